// Memory that a queue uses for one thing after the other: its order keeps them apart.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>

#include "device/device.h"

namespace psstore::device {

class Scratch {
 public:
  // The device outlives it.
  explicit Scratch(Device& device) : device_(device) {}
  // REQUIRES: the queue is done.
  ~Scratch() { device_.free(memory_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  bool empty() const { return memory_ == nullptr; }
  // Growing, which is rare, waits for what is queued. Null: there is no more.
  std::byte* of(Queue& queue, size_t num_bytes) {
    if (num_bytes <= num_bytes_) return memory_;
    if (memory_ != nullptr) queue.record()->wait();
    device_.free(std::exchange(memory_, nullptr));
    num_bytes_ = std::max(num_bytes, 2 * std::exchange(num_bytes_, 0));
    memory_ = device_.allocate(num_bytes_);
    if (memory_ == nullptr) num_bytes_ = 0;
    return memory_;
  }

 private:
  Device& device_;
  std::byte* memory_ = nullptr;
  size_t num_bytes_ = 0;
};

}  // namespace psstore::device
