#include "shm/borrowed_device.h"

#include <utility>

namespace psstore {
namespace {

void check_size(const SliceEntry& entry, size_t target_bytes) {
  if (entry.num_bytes == target_bytes || entry.num_bytes == 0) return;
  throw Error(ErrorCode::BAD_HEADER, "slice of key " + std::to_string(entry.key) + " came with " +
                                         std::to_string(entry.num_bytes) + " bytes, expected " +
                                         std::to_string(target_bytes));
}

}  // namespace

BorrowedDevice::~BorrowedDevice() {
  for (const auto& [address, block] : blocks_) {
    if (!block.own) device_->end_import(block.data);
  }
}

void BorrowedDevice::add_block(uint64_t address, size_t num_bytes, const std::string& handle) {
  const MutexLock lock(mutex_);
  if (blocks_.contains(address)) return;
  blocks_[address] = {device_->import_block(handle), num_bytes, nullptr};
}

void BorrowedDevice::add_own_block(std::shared_ptr<device::SharedBlock> block) {
  const MutexLock lock(mutex_);
  blocks_[block->address()] = {block->data(), block->num_bytes(), block};
}

std::byte* BorrowedDevice::at(uint64_t address, size_t num_bytes) const {
  const MutexLock lock(mutex_);
  const auto next = blocks_.upper_bound(address);
  if (next != blocks_.begin()) {
    const auto& [begin, block] = *std::prev(next);
    const uint64_t offset = address - begin;
    if (offset <= block.num_bytes && num_bytes <= block.num_bytes - offset) {
      return block.data + offset;
    }
  }
  throw Error(ErrorCode::BAD_HEADER, std::to_string(num_bytes) + " bytes at " +
                                         std::to_string(address) +
                                         " lie in no block that the shard shares");
}

void BorrowedDevice::read(device::Queue& queue, std::span<const SliceEntry> entries,
                          std::span<const DeviceRange> targets) const {
  if (entries.size() != targets.size()) {
    throw Error(ErrorCode::BAD_HEADER, "an answer of " + std::to_string(entries.size()) +
                                           " slices came where " + std::to_string(targets.size()) +
                                           " were asked for");
  }
  CopyList copies;
  for (size_t i = 0; i < entries.size(); ++i) {
    check_size(entries[i], targets[i].num_bytes);
    const size_t num_bytes = entries[i].num_bytes;
    copies.add(targets[i].data, at(entries[i].offset, num_bytes), num_bytes);
  }
  queue.copy_pieces(copies.pieces());
}

DevicePushes::DevicePushes(std::shared_ptr<BorrowedDevice> blocks, int control_fd, uint64_t address,
                           size_t num_bytes)
    : blocks_(std::move(blocks)),
      data_(blocks_->at(address, num_bytes)),
      address_(address),
      num_bytes_(num_bytes),
      rooms_(control_fd, num_bytes) {}

std::unique_ptr<PushRoom> DevicePushes::take(size_t num_bytes) {
  const MutexLock lock(mutex_);
  const std::optional<size_t> first_block = rooms_.take(num_bytes);
  if (!first_block) return nullptr;
  return std::make_unique<PushRoom>(shared_from_this(), *first_block, num_bytes);
}

PushRoom::~PushRoom() {
  if (sent_) return;
  const MutexLock lock(pushes_->mutex_);
  pushes_->rooms_.cancel(first_block_);
}

void PushRoom::write(device::Queue& queue, std::span<const DeviceRange> sources) {
  size_t total = 0;
  for (const DeviceRange& source : sources) total += source.num_bytes;
  if (total != num_bytes_) {
    throw Error(ErrorCode::BAD_ARGUMENT, "a room of " + std::to_string(num_bytes_) +
                                             " bytes was given " + std::to_string(total));
  }
  std::byte* to = pushes_->data_ + first_block_ * kPushBlockBytes;
  CopyList copies;
  for (const DeviceRange& source : sources) {
    copies.add(to, source.data, source.num_bytes);
    to += source.num_bytes;
  }
  queue.copy_pieces(copies.pieces());
}

uint64_t PushRoom::send(uint64_t number) {
  const MutexLock lock(pushes_->mutex_);
  pushes_->rooms_.sent(first_block_, number);
  sent_ = true;
  return pushes_->address_ + first_block_ * kPushBlockBytes;
}

}  // namespace psstore
