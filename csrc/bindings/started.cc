#include "bindings/started.h"

#include <utility>

namespace psstore::bindings {

StartedCall::StartedCall(std::shared_ptr<StartingParts> parts, Habit habit,
                         std::vector<Segments> memories, py::object sender_object,
                         py::object terms_object, py::object results)
    : parts_(std::move(parts)),
      habit_(std::move(habit)),
      sender_object_(std::move(sender_object)),
      terms_object_(std::move(terms_object)),
      terms_(terms_object_.cast<const Terms&>()),
      results_(std::move(results)),
      whole_(parts_->make()),
      attempt_(*habit_.plan, std::move(memories), sender_object_.cast<const Sender&>(), terms_),
      num_unanswered_(attempt_.num_frames()) {}

void StartedCall::leave(double now_s) {
  begun_s_ = now_s;
  const auto self = shared_from_this();
  for (size_t frame = 0; frame < attempt_.num_frames(); ++frame) {
    attempt_.line(frame).add_started({attempt_.call(frame).request, self, frame});
  }
  attempt_.leave_unsent(self);
  if (terms_.op == Op::kPUSH) parts_->under_way.add(whole_);
}

bool StartedCall::is_answer(size_t frame, const Frame& reply) const {
  return attempt_.call(frame).is_answered_by(reply);
}

bool StartedCall::read_shared(size_t frame, const Frame& reply) {
  if (cancelled()) return true;
  const py::gil_scoped_release no_gil;
  return psstore::read_shared(attempt_.call(frame), reply);
}

py::object StartedCall::destination(size_t frame) {
  return cancelled() ? py::none() : attempt_.memory(frame);
}

void StartedCall::answered(size_t frame, std::shared_ptr<Frame> reply, double now_s) {
  attempt_.note_answer(frame, *reply, now_s);
  attempt_.answer(frame, std::move(reply));
  if (--num_unanswered_ == 0) conclude();
}

void StartedCall::conclude() {
  if (attempt_.succeeded()) {
    parts_->ended(whole_, habit_.op, habit_.layout,
                  attempt_.reads() ? attempt_.answers() : py::list(), results_);
  } else {
    parts_->unfinished(whole_, habit_.op, habit_.layout, attempt_.answers(), results_);
  }
}

void StartedCall::hand_over() {
  const auto self = shared_from_this();
  py::list futures =
      parts_->unfinished(whole_, habit_.op, habit_.layout, attempt_.answers(), results_);
  for (size_t frame = 0; frame < attempt_.num_frames(); ++frame) {
    attempt_.line(frame).forget_started(attempt_.call(frame).request);
  }
  attempt_.leave_requests(futures, begun_s_);
}

bool StartedCall::cancelled() const {
  return whole_.attr("cancelled")().cast<bool>();
}

}  // namespace psstore::bindings
