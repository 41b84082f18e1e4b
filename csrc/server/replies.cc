#include "server/replies.h"

#include <algorithm>

namespace psstore {

std::span<const std::byte> bytes_of(const Replies::Part& part) {
  if (const auto* const piece = std::get_if<Piece>(&part)) {
    return {piece->buffer->data(), piece->num_bytes};
  }
  return std::as_bytes(std::span(std::get<std::string>(part)));
}

void Replies::clear() {
  parts_.clear();
  waiting_.clear();
  sent_bytes_ = num_bytes_ = free_bytes_ = leased_bytes_ = 0;
}

void Replies::wait(size_t num_bytes) {
  const uint64_t record = gate_->last();
  if (waiting_.empty() || waiting_.back().record < record) waiting_.push_back({record, 0});
  waiting_.back().num_bytes += num_bytes;
  gate_->waits(connection_);
}

size_t Replies::num_free_bytes() {
  while (!waiting_.empty() && waiting_.front().record <= gate_->released()) {
    free_bytes_ += waiting_.front().num_bytes;
    waiting_.pop_front();
  }
  if (!waiting_.empty()) gate_->waits(connection_);
  return free_bytes_;
}

Replies::Parts Replies::take() {
  size_t left = num_free_bytes();
  num_bytes_ -= left;
  free_bytes_ = 0;
  if (num_bytes_ == 0) {
    leased_bytes_ = 0;
    return std::exchange(parts_, {});
  }
  Parts taken;
  while (left > 0) {
    Part& first = parts_.front();
    const size_t num_bytes = std::min(bytes_of(first).size(), left);
    left -= num_bytes;
    if (num_bytes == bytes_of(first).size()) {
      taken.push_back(std::move(first));
      parts_.pop_front();
    } else {  // what is together was added at different times; references are whole
      std::string& together = std::get<std::string>(first);
      taken.emplace_back(together.substr(0, num_bytes));
      together.erase(0, num_bytes);
    }
  }
  return taken;
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
  free_bytes_ -= num_bytes;
  sent_bytes_ += num_bytes;
  while (!parts_.empty() && sent_bytes_ >= bytes_of(parts_.front()).size()) {
    sent_bytes_ -= bytes_of(parts_.front()).size();
    parts_.pop_front();
  }
  if (parts_.empty()) leased_bytes_ = 0;
}

}  // namespace psstore
