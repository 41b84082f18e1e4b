// Memory of a device for slots, and pinned memory of the host for payloads and replies.
//
// A block of the device that nobody refers to any more may still be read or written by what was queued
// before: it is kept aside until the backend has seen all that done. What was kept is handed out again
// without a word to the device, which takes and gives memory slowly.
//
//   allocate() ─► in use ─ last reference goes ─► released ─ take_released() ─► held by the backend
//        ▲                                                                       until its fences
//        └──────────────────────────── idle in the pool ◄────────────────────────────────┘
//
// Thread-safe.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "core/buffer.h"
#include "core/mutex.h"
#include "device/device.h"
#include "device/device_arena.h"

namespace psstore {

class DeviceMemory : public BufferOwner, public std::enable_shared_from_this<DeviceMemory> {
 public:
  // `host`: what the pinned memory is taken from; null: there is no limit.
  explicit DeviceMemory(std::shared_ptr<device::Device> device,
                        std::shared_ptr<MemoryBudget> host = nullptr);

  // Contents undefined. Empty: no idle block fits, and the device has no other.
  BufferRef allocate(size_t num_bytes);
  // Of the device, so that it can be blocks of other sizes.
  void give_idle_back();
  // As if it were of here: what is kept of it when nobody refers to it is released with the rest.
  BufferRef lease(BufferRef block);
  // What work that is queued now may still use, and none that is queued later.
  std::vector<BufferRef> take_released();

  const std::shared_ptr<BufferPool>& pinned() const { return pinned_; }
  const device::DeviceArena& arena() const { return *arena_; }
  size_t pool_bytes() const;
  size_t pool_idle_bytes() const;

 private:
  void release(Buffer* buffer) noexcept override;

  const std::shared_ptr<device::DeviceArena> arena_;
  const std::shared_ptr<BufferPool> blocks_;  // of the arena
  const std::shared_ptr<BufferPool> pinned_;
  Mutex mutex_;
  std::vector<BufferRef> released_ GUARDED_BY(mutex_);
};

}  // namespace psstore
