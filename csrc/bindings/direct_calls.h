// The pushes and pulls of a store that go as such a call went before, from their arguments to their result, or
// to what was started: what they come to, and what they say.
//
// Whatever is not as before is no error here, but for those who look at everything: `NotImplemented` says so.
#pragma once

#include <optional>
#include <string>

#include "bindings/call.h"
#include "bindings/call_driver.h"

namespace psstore::bindings {

// What it asks of Python.
struct DirectCallParts {
  py::object driver_object;
  py::list sessions;  // by way
  py::sequence
      plans;  // one dict, by manner, see client/layout.py: another one in another kind of round
  py::list
      terms;  // one dict, by whose they are and by operation: another one when somebody has the loop
  py::object whose;  // this store's, of all that have that loop
  py::object
      renew;  // (op, layout, wait_s) -> CallTerms, or None if something has to be said or done before
  py::object sent;      // (op, layout): it is acknowledged
  py::object received;  // (layout, answers)
  py::object newer;     // the same of what was asked for only if it is: and results -> the pull's
  py::object
      conclude;  // (layout, call) -> answers: waits for what is missing, and raises what failed
  bool reads_consistently;  // who does not say
  std::shared_ptr<StartingParts> starting;
};

// What its caller asks for. `op`, `dtype`, `wait_s`, `consistent`: as Python has them, or None.
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
  py::handle consistent;
};

class DirectCalls {
 public:
  explicit DirectCalls(DirectCallParts parts);

  // False: not now, or not so. A pull leaves the arrays that it has filled in `asked.out`.
  bool push(const PushAsked& asked);
  bool pull(PullAsked& asked);
  // The same, not waited for: what was started, or null.
  py::object start_push(const PushAsked& asked);
  py::object start_pull(PullAsked& asked);

 private:
  std::optional<CallPlan> plan_of(const PushAsked& asked) const;
  std::optional<CallPlan> plan_of(const PullAsked& asked) const;
  std::optional<CallPlan> plan(const py::tuple& manner) const;
  bool may_go(const CallPlan& plan, const PullAsked& asked) const;
  py::object terms_of(const CallPlan& plan, py::handle wait_s) const;
  // The answers. None: nothing was done.
  std::optional<py::list> carry_out(const CallPlan& plan, const py::sequence& arrays,
                                    py::handle wait_s, py::handle if_newer_than);
  py::list conclude_left(const CallPlan& plan, const std::shared_ptr<Call>& call);
  py::object start(const CallPlan& plan, const py::sequence& arrays, py::handle wait_s,
                   py::object results);

  DirectCallParts parts_;
  CallDriver& driver_;
  const std::shared_ptr<const SessionList> store_;
};

}  // namespace psstore::bindings
