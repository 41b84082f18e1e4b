#include "table/device_memory.h"

#include <cstdint>
#include <new>
#include <utility>

namespace psstore {
namespace {

using device::Device;

// Idle pinned memory: payloads in flight both ways. All of the device's memory may be idle: it is taken from
// there before anything else, and given back when the device has no other.
constexpr size_t kMaxIdlePinnedBytes = 256u << 20;
constexpr size_t kMaxIdleDeviceBytes = SIZE_MAX;

class PinnedBlocks final : public BlockSource {
 public:
  explicit PinnedBlocks(std::shared_ptr<Device> device) : device_(std::move(device)) {}
  std::byte* take(size_t num_bytes) noexcept override try {
    return device_->allocate_pinned(num_bytes);
  } catch (const Error&) {
    return nullptr;
  }
  void give_back(std::byte* block, size_t) noexcept override { device_->free_pinned(block); }

 private:
  const std::shared_ptr<Device> device_;
};

// What slots refer to: the pool's block goes on living when nobody refers to this any more.
struct Lease : Buffer {
  explicit Lease(BufferRef lent)
      : Buffer(lent->data(), lent->size(), lent->size()), block(std::move(lent)) {}
  BufferRef block;
};

}  // namespace

DeviceMemory::DeviceMemory(std::shared_ptr<Device> device, std::shared_ptr<MemoryBudget> host)
    : arena_(std::make_shared<device::DeviceArena>(device)),
      blocks_(BufferPool::create_over(kMaxIdleDeviceBytes, arena_, /*or_heap=*/false)),
      pinned_(BufferPool::create_over(kMaxIdlePinnedBytes, std::make_shared<PinnedBlocks>(device),
                                      /*or_heap=*/true, std::move(host))) {}

BufferRef DeviceMemory::allocate(size_t num_bytes) {
  try {
    return lease(blocks_->allocate(num_bytes));
  } catch (const std::bad_alloc&) {
    return {};
  }
}

BufferRef DeviceMemory::lease(BufferRef block) {
  return BufferRef::adopt(new Lease(std::move(block)), shared_from_this());
}

void DeviceMemory::give_idle_back() {
  blocks_->free_idle();
  arena_->trim();
}

std::vector<BufferRef> DeviceMemory::take_released() {
  const MutexLock lock(mutex_);
  return std::exchange(released_, {});
}

void DeviceMemory::release(Buffer* buffer) noexcept {
  auto* const lease = static_cast<Lease*>(buffer);
  {
    const MutexLock lock(mutex_);
    released_.push_back(std::move(lease->block));
  }
  delete lease;
}

size_t DeviceMemory::pool_bytes() const {
  return blocks_->bytes_in_use() + blocks_->bytes_idle() + pinned_->bytes_in_use() +
         pinned_->bytes_idle();
}

size_t DeviceMemory::pool_idle_bytes() const {
  return blocks_->bytes_idle() + pinned_->bytes_idle();
}

}  // namespace psstore
