#include "server/replies.h"

#include <algorithm>

namespace psstore {
namespace {

std::span<const std::byte> bytes_of(const Replies::Part& part) {
  if (const auto* const piece = std::get_if<Piece>(&part)) {
    return {piece->buffer->data(), piece->num_bytes};
  }
  return std::as_bytes(std::span(std::get<std::string>(part)));
}

}  // namespace

void Replies::clear() {
  parts_.clear();
  sent_bytes_ = num_bytes_ = leased_bytes_ = 0;
}

size_t Replies::ranges(std::span<iovec> room) const {
  const size_t count = std::min(room.size(), parts_.size());
  for (size_t i = 0; i < count; ++i) {
    const auto bytes = bytes_of(parts_[i]).subspan(i == 0 ? sent_bytes_ : 0);
    room[i] = {const_cast<std::byte*>(bytes.data()), bytes.size()};  // only read
  }
  return count;
}

void Replies::sent(size_t num_bytes) {
  num_bytes_ -= num_bytes;
  sent_bytes_ += num_bytes;
  while (!parts_.empty() && sent_bytes_ >= bytes_of(parts_.front()).size()) {
    sent_bytes_ -= bytes_of(parts_.front()).size();
    parts_.pop_front();
  }
  if (parts_.empty()) leased_bytes_ = 0;
}

}  // namespace psstore
