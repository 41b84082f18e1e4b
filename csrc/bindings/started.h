// A call that was started, from its last byte sent to its last answer: it waits on its lines, and costs no
// Python but one call at its end.
//
// That holds as long as it is answered plainly. Whatever else happens (an error, a lost connection, a deadline,
// somebody who asks a session for all its requests) makes its requests their sessions' own: hand_over.
//
// Needs the GIL and the loop, as an Attempt does.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "bindings/attempt.h"

namespace psstore::bindings {

// What a call came to: an operation, and how its arrays go to and from the shards.
struct Habit {
  py::str op;
  py::object layout;  // of Python
  py::object plan_object;
  const FramePlan* plan;
  bool reads;
};

// What started calls ask of Python. `whole`: what a caller has. `answers`: of each frame, or None.
struct StartingParts {
  py::object make;   // () -> a whole
  py::object ended;  // (whole, op, layout, answers, results): answered, and well
  py::object
      unfinished;  // (whole, op, layout, answers, results) -> futures for the answers that are missing
  py::object look_after;  // (layout): something is left to whoever drives its connections
  py::object catch_up;    // (): has what was asked of the loop before begin now, if it can
  py::object paced;       // () -> whether calls have to wait for their turns
  py::set under_way;      // pushes
};

class StartedCall : public std::enable_shared_from_this<StartedCall> {
 public:
  // `sender_object`: a Sender. `terms_object`: a Terms. `results`: what a read returns.
  StartedCall(std::shared_ptr<StartingParts> parts, Habit habit, std::vector<Segments> memories,
              py::object sender_object, py::object terms_object, py::object results);

  // What its caller has.
  const py::object& whole() const { return whole_; }
  Attempt& attempt() { return attempt_; }
  double deadline_s() const { return begun_s_ + terms_.timeout_s; }

  // Once it is sent, or waits to be: its lines have it from now on.
  void leave(double now_s);

  // ---- what its lines call ----

  // The frame is what was asked for, whole or announced.
  bool is_answer(size_t frame, const Frame& reply) const;
  // Copies what lies in shared memory, unless nobody wants it any more. False: as of psstore::read_shared.
  bool read_shared(size_t frame, const Frame& reply);
  // Where the announced payload goes. None: nobody wants it any more.
  py::object destination(size_t frame);
  // The line has forgotten the request. It ends with the last answer.
  void answered(size_t frame, std::shared_ptr<Frame> reply, double now_s);
  // Its lines forget its requests: they are their sessions'.
  void hand_over();

 private:
  bool cancelled() const;
  void conclude();

  const std::shared_ptr<StartingParts> parts_;
  const Habit habit_;
  const py::object sender_object_;
  const py::object terms_object_;
  const Terms& terms_;
  const py::object results_;
  const py::object whole_;
  Attempt attempt_;
  size_t num_unanswered_;
  double begun_s_ = 0;
};

}  // namespace psstore::bindings
