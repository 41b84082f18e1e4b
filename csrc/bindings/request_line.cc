#include "bindings/request_line.h"

#include <utility>

#include "bindings/started.h"

namespace psstore::bindings {

void RequestLine::leave(std::span<const iovec> pieces, std::shared_ptr<void> owner) {
  if (pieces.empty()) return;
  const py::capsule kept(new std::shared_ptr<void>(std::move(owner)),
                         [](void* held) { delete static_cast<std::shared_ptr<void>*>(held); });
  for (const iovec& piece : pieces) {
    unsent_.attr("append")(
        make_readonly_view(kept, {static_cast<std::byte*>(piece.iov_base), piece.iov_len}));
  }
}

bool RequestLine::send_held() {
  Held held = std::exchange(held_, {});
  if (held.newest_write != 0) last_write_out_ = held.newest_write;
  if (!connected()) return true;
  if (free() && (!held.outgoing.send(fd_) || held.outgoing.done())) return true;
  auto owners = std::make_shared<std::vector<std::shared_ptr<void>>>(std::move(held.owners));
  leave(held.outgoing.pieces(), std::move(owners));
  return false;
}

// ---- requests of calls that were started ------------------------------------------------------------

std::shared_ptr<Frame> RequestLine::next_frame(PyDecoder& decoder, double now_s) {
  std::shared_ptr<Frame> frame;
  do {
    frame = decoder.next_frame();
  } while (frame != nullptr && take(decoder, frame, now_s));
  return frame;
}

// False: the session is to see to it.
bool RequestLine::take(PyDecoder& decoder, const std::shared_ptr<Frame>& frame, double now_s) {
  const auto found = find_started(frame->header.request);
  if (found == started_.end()) return false;
  const StartedRequest request = *found;
  if (!request.call->is_answer(request.frame, *frame)) {
    request.call->hand_over();
    return false;
  }
  if (frame->complete) {
    started_.erase(found);
    request.call->answered(request.frame, frame, now_s);
    return true;
  }
  const py::object destination = request.call->destination(request.frame);
  destination.is_none() ? decoder.discard() : decoder.accept(destination);
  return true;
}

void RequestLine::forget_started(uint64_t id) {
  const auto found = find_started(id);
  if (found != started_.end()) started_.erase(found);
}

void RequestLine::hand_over() {
  while (!started_.empty()) {
    const std::shared_ptr<StartedCall> call = started_.front().call;
    call->hand_over();
  }
}

std::optional<double> RequestLine::next_deadline() const {
  std::optional<double> next;
  for (const StartedRequest& request : started_) {
    const double deadline_s = request.call->deadline_s();
    if (!next || deadline_s < *next) next = deadline_s;
  }
  return next;
}

}  // namespace psstore::bindings
