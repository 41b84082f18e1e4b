#include "shm/seen_memory.h"

#include "core/errors.h"

namespace psstore {

struct SeenMemory::Range : Buffer {
  Range(std::byte* data, size_t size, uint64_t record) : Buffer(data, size, size), number(record) {}
  const uint64_t number;
};

std::shared_ptr<SeenMemory> SeenMemory::map(int file, uint64_t address) {
  return std::shared_ptr<SeenMemory>(new SeenMemory(file, address));
}

SeenMemory::SeenMemory(int file, uint64_t address)
    : memory_(file, size_of_sealed(file), Access::kRead), address_(address), mapped_(memory_) {}

BufferRef SeenMemory::range_of(std::span<const SliceEntry> entries, uint64_t number) {
  const uint64_t begin = entries.empty() ? memory_.size() : entries.front().offset - address_;
  uint64_t num_bytes = 0;
  for (const SliceEntry& entry : entries) num_bytes += entry.num_bytes;
  if (num_bytes == 0 || begin > memory_.size() || num_bytes > memory_.size() - begin) {
    throw Error(ErrorCode::BAD_HEADER,
                "a record whose payload lies beyond the memory that is seen");
  }
  const MutexLock lock(mutex_);
  // What is there has memory: this is for its pages to be mapped together, and once.
  if (!mapped_.populate(begin, num_bytes)) {
    throw Error(ErrorCode::OVERLOADED, "no memory to map what the shard shares");
  }
  released_.reserve(released_.size() + num_out_ + 1);  // so that noting it takes no memory
  ++num_out_;
  return BufferRef::adopt(new Range(memory_.data() + begin, num_bytes, number), shared_from_this());
}

std::vector<uint64_t> SeenMemory::take_released() {
  const MutexLock lock(mutex_);
  std::vector<uint64_t> taken = released_;
  released_.clear();
  return taken;
}

void SeenMemory::close() {
  const MutexLock lock(mutex_);
  closed_ = true;
}

bool SeenMemory::is_over() {
  const MutexLock lock(mutex_);
  return closed_ && num_out_ == 0 && released_.empty();
}

void SeenMemory::release(Buffer* buffer) noexcept {
  auto* const range = static_cast<Range*>(buffer);
  {
    const MutexLock lock(mutex_);
    released_.push_back(range->number);
    --num_out_;
  }
  delete range;
}

}  // namespace psstore
