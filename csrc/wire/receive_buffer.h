// The fixed memory between the socket and the decoder: filled at its end, taken up from its start.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <utility>

#include "core/buffer.h"

namespace psstore {

class ReceiveBuffer {
 public:
  explicit ReceiveBuffer(BufferRef memory) : memory_(std::move(memory)) {}

  const BufferRef& memory() const { return memory_; }

  // What has arrived and is not taken up yet.
  std::span<const std::byte> bytes() const { return {memory_->data() + begin_, end_ - begin_}; }
  bool empty() const { return begin_ == end_; }
  bool full() const { return end_ - begin_ == memory_->size(); }

  // Free memory, as much as there is: what waits is moved to the start first, which is next to nothing
  // (part of a header) unless the owner lets bytes lie.
  std::span<std::byte> room() {
    if (begin_ > 0) std::memmove(memory_->data(), memory_->data() + begin_, end_ - begin_);
    end_ -= std::exchange(begin_, 0);
    return {memory_->data() + end_, memory_->size() - end_};
  }
  // REQUIRES: num_bytes <= room().size().
  void filled(size_t num_bytes) { end_ += num_bytes; }
  // REQUIRES: num_bytes <= bytes().size().
  void take(size_t num_bytes) { begin_ += num_bytes; }

 private:
  BufferRef memory_;
  size_t begin_ = 0;
  size_t end_ = 0;
};

}  // namespace psstore
