// The pushes and pulls of a store that go as such a call went before, from their arguments to their result, or
// to what was started: what they come to, what they say, and their way to the shards and back.
//
// Whatever is not as before is no error here, but for those who look at everything: `NotImplemented` says so.
#pragma once

#include <optional>
#include <string>

#include "bindings/attempt.h"
#include "bindings/lane.h"
#include "bindings/started.h"

namespace psstore::bindings {

// What it asks of Python.
struct ShortCallParts {
  py::object lane_object;
  py::object sender_object;
  py::sequence
      habits;  // one dict, by manner, see client/layout.py: another one in another kind of round
  py::list terms;    // one dict, by operation: another one when somebody has the loop
  py::object renew;  // (habit, wait_s) -> Terms, or None if something has to be said or done before
  py::object future;    // () -> a future for a request
  py::object sent;      // (op, layout): it is acknowledged
  py::object received;  // (layout, answers)
  py::object newer;     // the same of what was asked for only if it is: and results -> the pull's
  py::object conclude;  // (layout, answers and requests) -> answers
  std::shared_ptr<StartingParts> starting;
};

// What its caller asks for. `op`, `dtype`, `wait_s`: as Python has them, or None.
struct PushAsked {
  py::tuple names;
  py::sequence values;
  py::handle op;
};
struct PullAsked {
  py::tuple names;
  std::optional<py::sequence> out;  // none: new arrays
  py::handle if_newer_than;
  py::handle dtype;
  py::handle wait_s;
};

class ShortCalls {
 public:
  explicit ShortCalls(ShortCallParts parts);

  // False: not now, or not so. A pull leaves the arrays that it has filled in `asked.out`.
  bool push(const PushAsked& asked);
  bool pull(PullAsked& asked);
  // The same, not waited for: what was started, or null.
  py::object start_push(const PushAsked& asked);
  py::object start_pull(PullAsked& asked);

 private:
  std::optional<Habit> habit_of(const PushAsked& asked) const;
  std::optional<Habit> habit_of(const PullAsked& asked) const;
  std::optional<Habit> habit(const py::tuple& manner) const;
  py::object terms_of(const Habit& habit, py::handle wait_s) const;
  // The answers. None: nothing was done.
  std::optional<py::list> carry_out(const Habit& habit, const py::sequence& arrays,
                                    py::handle wait_s, py::handle if_newer_than);
  py::object start(const Habit& habit, const py::sequence& arrays, py::handle wait_s,
                   py::object results);

  ShortCallParts parts_;
  FastLane& lane_;
  const Sender& sender_;
  py::list futures_;  // for requests that are not answered at once
};

}  // namespace psstore::bindings
