#include "local/local_link.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/clock.h"

namespace psstore {
namespace {

// Returns how many bytes of it went to the window.
size_t fill(std::span<std::byte> window, Outgoing& outgoing) {
  size_t num_bytes = 0;
  for (const iovec& piece : outgoing.pieces()) {
    const size_t taken = std::min(piece.iov_len, window.size() - num_bytes);
    std::memcpy(window.data() + num_bytes, piece.iov_base, taken);
    num_bytes += taken;
    if (num_bytes == window.size()) break;
  }
  outgoing.sent(num_bytes);
  return num_bytes;
}

}  // namespace

void LocalLink::hear(Outgoing& outgoing) {
  serve();
  while (!is_held() && !outgoing.done()) {
    decoder_.written(fill(decoder_.writable().bytes, outgoing));
    serve();
  }
}

size_t LocalLink::answer(std::span<std::byte> window) {
  size_t num_bytes = 0;
  while (!answers_.empty() && num_bytes < window.size()) {
    const auto left = bytes_of(answers_.front()).subspan(answered_bytes_);
    const size_t taken = std::min(left.size(), window.size() - num_bytes);
    std::memcpy(window.data() + num_bytes, left.data(), taken);
    num_bytes += taken;
    answered_bytes_ += taken;
    if (taken < left.size()) break;
    answers_.pop_front();
    answered_bytes_ = 0;
  }
  return num_bytes;
}

// Reads of others may have got their answers by what was heard here.
bool LocalLink::wants_turn() const {
  if (is_held() || has_answers()) return true;
  const std::optional<double> wake = service_.next_wake();
  return wake && *wake <= monotonic_s();
}

std::shared_ptr<Frame> LocalLink::take_event() {
  if (failure_ != nullptr) std::rethrow_exception(std::exchange(failure_, nullptr));
  return std::exchange(event_, nullptr);
}

void LocalLink::reply(Replies::Parts parts) {
  take_answers();
  for (Replies::Part& part : parts) {
    if (!bytes_of(part).empty()) answers_.push_back(std::move(part));
  }
}

void LocalLink::serve() {
  while (!is_held()) {
    try {
      event_ = protocol_.next_frame(monotonic_s());
    } catch (const std::exception&) {
      failure_ = std::current_exception();
    }
    const bool is_full = protocol_.is_shut() && !protocol_.replies().empty();
    take_answers();
    if (event_ == nullptr && !is_full) return;  // it has no more for now, or is not heard
  }
}

void LocalLink::take_answers() {
  for (Replies::Part& part : protocol_.replies().take()) answers_.push_back(std::move(part));
}

}  // namespace psstore
