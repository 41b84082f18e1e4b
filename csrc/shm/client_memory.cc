#include "shm/client_memory.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>

namespace psstore {
namespace {

void check_entry(const SliceEntry& entry, size_t range_bytes, size_t arena_bytes) {
  if (entry.num_bytes != range_bytes && entry.num_bytes != 0) {
    throw Error(ErrorCode::BAD_HEADER, "slice of key " + std::to_string(entry.key) + " came with " +
                                           std::to_string(entry.num_bytes) + " bytes, expected " +
                                           std::to_string(range_bytes));
  }
  if (entry.offset > arena_bytes || entry.num_bytes > arena_bytes - entry.offset) {
    throw Error(ErrorCode::BAD_HEADER, "slice of key " + std::to_string(entry.key) +
                                           " lies beyond the end of the shard's memory");
  }
}

}  // namespace

ClientMemory::ClientMemory(int values_fd, int pushes_fd, int control_fd)
    : values_(values_fd, size_of_sealed(values_fd), Access::kRead),
      pushes_(pushes_fd, size_of_sealed(pushes_fd), Access::kWrite),
      control_(control_fd, size_of_sealed(control_fd), Access::kRead) {
  if (control_.size() != control_bytes(pushes_.size())) {
    throw std::invalid_argument("the files of a push arena do not belong together");
  }
}

void ClientMemory::read(std::span<const SliceEntry> entries,
                        std::span<const std::span<std::byte>> ranges) const {
  if (entries.size() != ranges.size()) {
    throw Error(ErrorCode::BAD_HEADER, "a payload of " + std::to_string(entries.size()) +
                                           " slices came where " + std::to_string(ranges.size()) +
                                           " were asked for");
  }
  for (size_t i = 0; i < entries.size(); ++i) {
    check_entry(entries[i], ranges[i].size(), values_.size());
  }
  for (size_t i = 0; i < entries.size(); ++i) {
    if (entries[i].num_bytes == 0) continue;
    std::memcpy(ranges[i].data(), values_.data() + entries[i].offset, entries[i].num_bytes);
  }
}

std::optional<uint64_t> ClientMemory::write(std::span<const std::span<std::byte>> ranges,
                                            uint64_t number) {
  size_t num_bytes = 0;
  for (const auto& range : ranges) num_bytes += range.size();
  const size_t num_blocks = (num_bytes + kPushBlockBytes - 1) / kPushBlockBytes;
  take_back();
  const std::optional<size_t> first_block = find_room(num_blocks);
  if (!first_block) return std::nullopt;
  const uint64_t begin = *first_block * kPushBlockBytes;
  std::byte* to = pushes_.data() + begin;
  for (const auto& range : ranges) {
    if (!range.empty()) std::memcpy(to, range.data(), range.size());
    to += range.size();
  }
  const auto place = std::find_if(lent_.begin(), lent_.end(), [&](const Lent& lent) {
    return lent.first_block > *first_block;
  });
  lent_.insert(place, {*first_block, num_blocks, number});
  return begin;
}

void ClientMemory::take_back() {
  auto* const released = reinterpret_cast<uint64_t*>(control_.data());
  std::erase_if(lent_, [&](const Lent& lent) {
    const std::atomic_ref<uint64_t> entry(released[lent.first_block]);
    return entry.load(std::memory_order_acquire) == lent.number;
  });
}

// The first gap that is wide enough, so that as little of the arena as possible ever needs memory.
std::optional<size_t> ClientMemory::find_room(size_t num_blocks) {
  size_t begin = 0;
  for (const Lent& lent : lent_) {
    if (lent.first_block - begin >= num_blocks) break;
    begin = lent.first_block + lent.num_blocks;
  }
  const size_t end = begin + num_blocks;
  if (end > pushes_.size() / kPushBlockBytes) return std::nullopt;
  if (end > num_present_) {
    const size_t missing = (end - num_present_) * kPushBlockBytes;
    if (!pushes_.populate(num_present_ * kPushBlockBytes, missing)) return std::nullopt;
    num_present_ = end;
  }
  return begin;
}

}  // namespace psstore
