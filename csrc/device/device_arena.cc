#include "device/device_arena.h"

#include <algorithm>
#include <utility>

namespace psstore::device {
namespace {

// CUDA hands out smaller allocations from pieces of this size, and exports such a piece with all that is in it.
constexpr size_t kGrainBytes = 2 << 20;
// A model's values are a few blocks then: importing one takes tens of microseconds.
constexpr size_t kLargestStepBytes = 256 << 20;

size_t whole(size_t num_bytes, size_t unit) {
  return std::max(unit, (num_bytes + unit - 1) / unit * unit);
}

}  // namespace

SharedBlock::SharedBlock(std::shared_ptr<Device> device, std::byte* data, size_t num_bytes,
                         uint64_t number, uint64_t address)
    : device_(std::move(device)),
      data_(data),
      num_bytes_(num_bytes),
      number_(number),
      address_(address) {}

SharedBlock::~SharedBlock() {
  device_->free(data_);
}

std::byte* DeviceArena::take(size_t num_bytes) noexcept try {
  const size_t size = whole(num_bytes, kBufferAlignment);
  const MutexLock lock(mutex_);
  std::byte* const range = take_hole(size);
  if (range != nullptr) return range;
  return add_block(size) ? take_hole(size) : nullptr;
} catch (const std::exception&) {
  return nullptr;
}

std::byte* DeviceArena::take_hole(size_t size) {
  const std::optional<uint64_t> address = holes_.take(size);
  if (!address) return nullptr;
  const SharedBlock* const block = block_at(*address);
  return block->data() + (*address - block->address());
}

// As large as is good, or else as what is wanted.
bool DeviceArena::add_block(size_t size) {
  const size_t needed = whole(size, kGrainBytes);
  for (const size_t num_bytes :
       {std::max(needed, std::min(total_bytes_, kLargestStepBytes)), needed, size}) {
    std::byte* const data = device_->allocate(num_bytes);
    if (data == nullptr) continue;
    const auto block =
        std::make_shared<SharedBlock>(device_, data, num_bytes, ++last_number_, next_address_);
    blocks_.emplace(data, block);
    by_address_.emplace(block->address(), block.get());
    holes_.give_back(block->address(), num_bytes);
    total_bytes_ += num_bytes;
    next_address_ += whole(num_bytes, kGrainBytes) + kGrainBytes;
    return true;
  }
  return false;
}

void DeviceArena::give_back(std::byte* range, size_t num_bytes) noexcept {
  const MutexLock lock(mutex_);
  const SharedBlock* const block = block_of(range);
  const uint64_t address = block->address() + static_cast<uint64_t>(range - block->data());
  holes_.give_back(address, whole(num_bytes, kBufferAlignment));
}

std::optional<uint64_t> DeviceArena::offset_of(const std::byte* data) const {
  const MutexLock lock(mutex_);
  const SharedBlock* const block = block_of(data);
  if (block == nullptr) return std::nullopt;
  return block->address() + static_cast<uint64_t>(data - block->data());
}

void DeviceArena::trim() noexcept {
  const MutexLock lock(mutex_);
  for (auto found = blocks_.begin(); found != blocks_.end();) {
    const SharedBlock& block = *found->second;
    const bool is_empty = holes_.is_hole(block.address(), block.num_bytes());
    if (!is_empty || found->second.use_count() > 1) {
      ++found;
      continue;
    }
    holes_.remove(block.address());
    total_bytes_ -= block.num_bytes();
    by_address_.erase(block.address());
    found = blocks_.erase(found);
  }
}

std::vector<std::shared_ptr<SharedBlock>> DeviceArena::blocks_after(uint64_t number) const {
  const MutexLock lock(mutex_);
  std::vector<std::shared_ptr<SharedBlock>> found;
  if (number == last_number_) return found;
  for (const auto& [data, block] : blocks_) {
    if (block->number() > number) found.push_back(block);
  }
  std::ranges::sort(found, {}, [](const auto& block) { return block->number(); });
  return found;
}

const SharedBlock* DeviceArena::block_of(const std::byte* data) const {
  auto next = blocks_.upper_bound(data);
  if (next == blocks_.begin()) return nullptr;
  const SharedBlock& block = *std::prev(next)->second;
  return data < block.data() + block.num_bytes() ? &block : nullptr;
}

const SharedBlock* DeviceArena::block_at(uint64_t address) const {
  return std::prev(by_address_.upper_bound(address))->second;
}

}  // namespace psstore::device
