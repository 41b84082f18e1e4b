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
  py::dict habits;   // by manner, see asked.py
  py::list terms;    // one dict, by operation: another one when somebody has the loop
  py::object renew;  // (habit, wait_s) -> Terms, or None if something has to be said or done before
  py::object future;    // () -> a future for a request
  py::object sent;      // (op, layout): it is acknowledged
  py::object received;  // (layout, answers)
  py::object conclude;  // (layout, answers and requests) -> answers
  std::shared_ptr<StartingParts> starting;
};

class ShortCalls {
 public:
  explicit ShortCalls(ShortCallParts parts);

  // False: not now, or not so. `op`, `dtype`, `wait_s`: as Python has them, or None.
  bool push(const py::tuple& names, const py::sequence& values, py::handle op);
  // The arrays into which it has pulled: `out`, or new ones.
  std::optional<py::sequence> pull(const py::tuple& names, std::optional<py::sequence> out,
                                   py::handle dtype, py::handle wait_s);
  // The same, not waited for: what was started, or null.
  py::object start_push(const py::tuple& names, const py::sequence& values, py::handle op);
  py::object start_pull(const py::tuple& names, std::optional<py::sequence> out, py::handle dtype,
                        py::handle wait_s);

 private:
  std::optional<Habit> push_habit(const py::tuple& names, py::handle op) const;
  std::optional<Habit> pull_habit(const py::tuple& names, bool fresh, py::handle dtype) const;
  std::optional<Habit> habit(const py::tuple& manner) const;
  py::object terms_of(const Habit& habit, py::handle wait_s) const;
  // The answers. None: nothing was done.
  std::optional<py::list> carry_out(const Habit& habit, const py::sequence& arrays,
                                    py::handle wait_s);
  py::object start(const Habit& habit, const py::sequence& arrays, py::handle wait_s,
                   py::object results);

  ShortCallParts parts_;
  FastLane& lane_;
  const Sender& sender_;
  py::list futures_;  // for requests that are not answered at once
};

}  // namespace psstore::bindings
