#include "serve/port.h"

#include <new>
#include <utility>

namespace psstore {

void Port::attach(const Life& worker) {
  peer_->worker = worker;
  desk_.attached(worker);
}

std::shared_ptr<Frame> Port::next_frame(double now_s) {
  while (replies_.num_bytes() < kMaxWaitingReplyBytes) {
    std::shared_ptr<Frame> frame = decoder_.next_frame();
    asked_ |= peer_ && frame != nullptr;
    if (frame != nullptr && !std::exchange(announced_, false) && take(frame, now_s)) continue;
    announced_ = frame != nullptr && !frame->complete;
    return frame;
  }
  return nullptr;
}

bool Port::take(const std::shared_ptr<Frame>& frame, double now_s) {
  if (!peer_ || !desk_.is_ordinary(*peer_, *frame)) return false;
  return frame->complete ? desk_.answer(*peer_, frame, replies_, now_s) : receive(*frame);
}

bool Port::receive(Frame& frame) {
  try {
    if (BufferRef destination = desk_.admit(frame)) {
      decoder_.accept(std::move(destination));
    } else {
      decoder_.discard();
    }
    return true;
  } catch (const Error&) {
    return false;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

}  // namespace psstore
