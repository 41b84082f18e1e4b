#include "shm/client_memory.h"

#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>

namespace psstore {
namespace {

std::atomic<uint64_t> last_arena{0};

Descriptor kept(int fd) {
  Descriptor copy(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (copy.get() < 0)
    throw std::system_error(errno, std::generic_category(), "keeping a file open");
  return copy;
}

}  // namespace

ClientMemory::ClientMemory(int values_fd, int pushes_fd, int control_fd)
    : arena_(++last_arena),
      values_file_(kept(values_fd)),
      values_(values_fd, size_of_sealed(values_fd), Access::kRead),
      pushes_(pushes_fd, size_of_sealed(pushes_fd), Access::kWrite),
      rooms_(control_fd, pushes_.size()) {}

void ClientMemory::check(const SliceEntry& entry, size_t num_bytes) const {
  if (entry.num_bytes != num_bytes && entry.num_bytes != 0) {
    throw Error(ErrorCode::BAD_HEADER, "slice of key " + std::to_string(entry.key) + " came with " +
                                           std::to_string(entry.num_bytes) + " bytes, expected " +
                                           std::to_string(num_bytes));
  }
  if (entry.offset > values_.size() || entry.num_bytes > values_.size() - entry.offset) {
    throw Error(ErrorCode::BAD_HEADER, "slice of key " + std::to_string(entry.key) +
                                           " lies beyond the end of the shard's memory");
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
    check(entries[i], ranges[i].size());
  }
  for (size_t i = 0; i < entries.size(); ++i) {
    if (entries[i].num_bytes == 0) continue;
    std::memcpy(ranges[i].data(), values_.data() + entries[i].offset, entries[i].num_bytes);
  }
  ++num_reads_;
}

std::optional<uint64_t> ClientMemory::write(std::span<const std::span<std::byte>> ranges,
                                            uint64_t number) {
  size_t num_bytes = 0;
  for (const auto& range : ranges) num_bytes += range.size();
  const std::optional<size_t> first_block = rooms_.take(num_bytes);
  if (!first_block) return std::nullopt;
  if (!make_present(*first_block + PushRooms::blocks_of(num_bytes))) {
    rooms_.cancel(*first_block);
    return std::nullopt;
  }
  const uint64_t begin = *first_block * kPushBlockBytes;
  std::byte* to = pushes_.data() + begin;
  for (const auto& range : ranges) {
    if (!range.empty()) std::memcpy(to, range.data(), range.size());
    to += range.size();
  }
  rooms_.sent(*first_block, number);
  ++num_writes_;
  return begin;
}

std::optional<std::vector<SliceEntry>> ClientMemory::place(
    std::span<const SliceEntry> entries, std::span<const std::span<std::byte>> ranges,
    uint64_t number) {
  const auto has_indices = [](const SliceEntry& entry) { return entry.dtype == DType::kTopK; };
  if (std::ranges::any_of(entries, has_indices)) return std::nullopt;
  std::optional<uint64_t> offset = write(ranges, number);
  if (!offset) return std::nullopt;
  return laid_out(entries, *offset);
}

// From the start on; false: there is no memory for them.
bool ClientMemory::make_present(size_t num_blocks) {
  if (num_blocks <= num_present_) return true;
  const size_t missing = (num_blocks - num_present_) * kPushBlockBytes;
  if (!pushes_.populate(num_present_ * kPushBlockBytes, missing)) return false;
  num_present_ = num_blocks;
  return true;
}

}  // namespace psstore
