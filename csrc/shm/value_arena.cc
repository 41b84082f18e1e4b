#include "shm/value_arena.h"

#include <fcntl.h>

#include <new>
#include <system_error>

namespace psstore {

ValueArena::ValueArena(size_t num_bytes)
    : file_(make_memory_file("psstore-values", whole_pages(num_bytes))),
      readonly_file_(reopen_readonly(file_)),
      memory_(file_.get(), whole_pages(num_bytes), Access::kWrite) {
  if (!memory_.populate(0, whole_pages(1))) {
    throw std::system_error(errno, std::generic_category(), "populating shared memory");
  }
}

std::byte* ValueArena::take(size_t num_bytes) noexcept {
  const size_t size = whole_pages(num_bytes);
  const std::optional<size_t> offset = find_range(size);
  if (!offset) return nullptr;
  if (memory_.populate(*offset, size)) return memory_.data() + *offset;
  keep_range(*offset, size);
  return nullptr;
}

void ValueArena::give_back(std::byte* block, size_t num_bytes) noexcept {
  const auto offset = static_cast<size_t>(block - memory_.data());
  const size_t size = whole_pages(num_bytes);
  // If it fails the memory stays where it is, until the range is taken again.
  (void)fallocate(file_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                  static_cast<off_t>(offset), static_cast<off_t>(size));
  keep_range(offset, size);
}

std::optional<size_t> ValueArena::find_range(size_t num_bytes) noexcept {
  const MutexLock lock(mutex_);
  const auto known = given_back_.find(num_bytes);
  if (known != given_back_.end() && !known->second.empty()) {
    const size_t offset = known->second.back();
    known->second.pop_back();
    return offset;
  }
  if (num_bytes > memory_.size() - end_) return std::nullopt;
  return std::exchange(end_, end_ + num_bytes);
}

void ValueArena::keep_range(size_t offset, size_t num_bytes) noexcept {
  const MutexLock lock(mutex_);
  try {
    given_back_[num_bytes].push_back(offset);
  } catch (const std::bad_alloc&) {
    // Addresses are lost, no memory.
  }
}

std::optional<uint64_t> ValueArena::offset_of(const std::byte* data) const {
  if (data < memory_.data() || data >= memory_.data() + memory_.size()) return std::nullopt;
  return static_cast<uint64_t>(data - memory_.data());
}

}  // namespace psstore
