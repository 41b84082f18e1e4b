// Where launches find what they read of the host: blocks of pinned memory, each with its twin on the device, used again
// once the fence after its last use has passed.
#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <string>
#include <utility>

#include "device/device.h"
#include "kernels/batch_cuda.h"

namespace psstore::device {

class LaunchTables final : public LaunchMemorySource {
 public:
  // The device outlives it. `smallest_bytes`: of a block.
  LaunchTables(Device& device, size_t smallest_bytes)
      : device_(device), smallest_bytes_(smallest_bytes) {}
  // REQUIRES: the queue is done.
  ~LaunchTables() override {
    for (const Block& block : ring_) release(block.memory);
  }
  LaunchTables(const LaunchTables&) = delete;
  LaunchTables& operator=(const LaunchTables&) = delete;

  bool empty() const { return ring_.empty(); }
  // One that is free and large enough, or a new one. Where the device has no memory for that, it waits for one in use.
  // Throws Error(OUT_OF_MEMORY) if there is none of that size either.
  LaunchMemory take(size_t num_bytes) override {
    num_bytes = (num_bytes + kWordBytes - 1) / kWordBytes * kWordBytes;
    for (Block& block : ring_) {
      if (block.memory.num_bytes >= num_bytes && (!block.used || block.used->done())) {
        return lent(block);
      }
    }
    const LaunchMemory made = make(std::max(num_bytes, smallest_bytes_));
    if (made.num_bytes > 0) return lent(ring_.emplace_back(Block{made, nullptr}));
    for (Block& block : ring_) {
      if (block.memory.num_bytes < num_bytes) continue;
      block.used->wait();
      return lent(block);
    }
    throw Error(ErrorCode::OUT_OF_MEMORY, "device " + device_.name() + " has no " +
                                              std::to_string(num_bytes) +
                                              " bytes left for the table of a launch");
  }
  // What was taken last, if anything was, is free after this.
  void used_until(FenceRef fence) {
    if (last_ != nullptr) std::exchange(last_, nullptr)->used = std::move(fence);
  }

 private:
  static constexpr size_t kWordBytes = 16;  // a launch's memory is read by whole words

  struct Block {
    LaunchMemory memory;
    FenceRef used;
  };

  LaunchMemory lent(Block& block) {
    last_ = &block;
    return block.memory;
  }
  // Of no bytes: there is no memory.
  LaunchMemory make(size_t num_bytes) {
    const LaunchMemory made{device_.allocate_pinned(num_bytes), device_.allocate(num_bytes),
                            num_bytes};
    if (made.pinned != nullptr && made.device != nullptr) return made;
    release(made);
    return {};
  }
  void release(const LaunchMemory& memory) {
    device_.free(memory.device);
    device_.free_pinned(memory.pinned);
  }

  Device& device_;
  const size_t smallest_bytes_;
  std::deque<Block> ring_;  // references to its elements stay good
  Block* last_ = nullptr;
};

}  // namespace psstore::device
