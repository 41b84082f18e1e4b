#include "client/outgoing.h"

#include <algorithm>
#include <utility>

namespace psstore {

void Outgoing::add(std::vector<std::byte> head, std::span<const std::span<std::byte>> payload,
                   std::shared_ptr<const void> owner) {
  add_piece(head, /*may_join=*/false);
  for (size_t i = 0; i < payload.size(); ++i) add_piece(payload[i], /*may_join=*/i > 0);
  frames_.push_back({std::move(head), std::move(owner), pieces_.size(), !payload.empty()});
}

// Slices of one tensor lie side by side: one piece.
void Outgoing::add_piece(std::span<const std::byte> bytes, bool may_join) {
  if (bytes.empty()) return;
  num_bytes_ += bytes.size();
  auto* const data = const_cast<std::byte*>(bytes.data());  // only read
  if (may_join && !done()) {
    iovec& last = pieces_.back();
    if (static_cast<std::byte*>(last.iov_base) + last.iov_len == data) {
      last.iov_len += bytes.size();
      return;
    }
  }
  pieces_.push_back({data, bytes.size()});
}

std::vector<std::span<const iovec>> Outgoing::frames() const {
  std::vector<std::span<const iovec>> found;
  size_t begin = 0;
  for (const Frame& frame : frames_) {
    found.push_back(std::span(pieces_).subspan(begin, frame.end - begin));
    begin = frame.end;
  }
  return found;
}

void Outgoing::sent(size_t num_bytes) {
  num_bytes_ -= num_bytes;
  while (!done() && num_bytes >= pieces_[first_].iov_len) num_bytes -= pieces_[first_++].iov_len;
  if (num_bytes > 0) {
    iovec& piece = pieces_[first_];
    piece.iov_base = static_cast<std::byte*>(piece.iov_base) + num_bytes;
    piece.iov_len -= num_bytes;
  }
}

const Outgoing::Frame* Outgoing::unsent_frame(const void* owner) const {
  const auto found =
      std::ranges::find(frames_, owner, [](const Frame& f) { return f.owner.get(); });
  const bool unsent = found != frames_.end() && found->has_payload && found->end > first_;
  return unsent ? &*found : nullptr;
}

void Outgoing::move_payload(const void* owner, std::span<const std::byte> to) {
  const Frame* const frame = unsent_frame(owner);
  if (frame == nullptr) return;
  for (size_t i = frame->end; i > first_ && !to.empty();
       --i) {  // from behind: what is sent is in front
    iovec& piece = pieces_[i - 1];
    const auto bytes = to.last(piece.iov_len);
    piece.iov_base = const_cast<std::byte*>(bytes.data());  // only read
    to = to.first(to.size() - bytes.size());
  }
}

void Outgoing::tidy() {
  if (done()) {
    clear();
    return;
  }
  while (frames_.front().end <= first_) frames_.pop_front();
  if (first_ <= pieces_.size() / 2) return;
  pieces_.erase(pieces_.begin(), pieces_.begin() + static_cast<ptrdiff_t>(first_));
  for (Frame& frame : frames_) frame.end -= first_;
  first_ = 0;
}

// Letting go may run anything, also what adds to this.
void Outgoing::clear() {
  pieces_.clear();
  first_ = num_bytes_ = 0;
  std::deque<Frame> let_go;
  let_go.swap(frames_);
}

}  // namespace psstore
