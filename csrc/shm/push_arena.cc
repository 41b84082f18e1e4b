#include "shm/push_arena.h"

#include <sys/file.h>

#include <atomic>
#include <cerrno>
#include <string>

namespace psstore {
namespace {

[[noreturn]] void refuse(const std::string& why) {
  throw Error(ErrorCode::BAD_HEADER, "a payload in shared memory " + why);
}

}  // namespace

struct PushArena::Range : Buffer {
  Range(std::byte* data, size_t size, uint64_t frame) : Buffer(data, size, size), number(frame) {}
  const uint64_t number;
};

std::shared_ptr<PushArena> PushArena::create(size_t num_bytes) {
  const size_t whole_blocks = num_bytes / kPushBlockBytes * kPushBlockBytes;
  return std::shared_ptr<PushArena>(new PushArena(whole_blocks));
}

std::shared_ptr<PushArena> PushArena::create_over(BufferRef memory, uint64_t address,
                                                  std::shared_ptr<const void> reservation) {
  return std::shared_ptr<PushArena>(
      new PushArena(std::move(memory), address, std::move(reservation)));
}

PushArena::PushArena(size_t num_bytes)
    : num_bytes_(num_bytes),
      file_(make_memory_file("psstore-pushes", num_bytes)),
      memory_(std::in_place, file_.get(), num_bytes, Access::kRead),
      data_(memory_->data()),
      control_file_(make_memory_file("psstore-control", control_bytes(num_bytes))),
      readonly_control_file_(reopen_readonly(control_file_)),
      control_(control_file_.get(), control_bytes(num_bytes), Access::kWrite),
      present_(*memory_) {}

PushArena::PushArena(BufferRef on_device, uint64_t address, std::shared_ptr<const void> reservation)
    : num_bytes_(on_device->size()),
      reservation_(std::move(reservation)),
      on_device_(std::move(on_device)),
      address_(address),
      data_(on_device_->data()),
      control_file_(make_memory_file("psstore-control", control_bytes(num_bytes_))),
      readonly_control_file_(reopen_readonly(control_file_)),
      control_(control_file_.get(), control_bytes(num_bytes_), Access::kWrite) {
  flock(readonly_control_file_.get(), LOCK_SH);
}

// A lock is that of all who have the same opening of a file, handed on or mapped, and ends with the last of them.
bool PushArena::is_let_go() {
  if (!on_device_) return true;
  readonly_control_file_ = Descriptor();
  return flock(control_file_.get(), LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
}

// What is more than numbers would have to be looked at, and could be changed afterwards.
bool PushArena::may_hold(DType dtype) const {
  return on_device_ ? !is_encoding(dtype) : dtype != DType::kTopK;
}

BufferRef PushArena::range_of(std::span<const SliceEntry> entries, uint64_t number) {
  const uint64_t begin = entries.empty() ? 0 : entries.front().offset - address_;
  if (begin % kPushBlockBytes != 0) refuse("that begins within a block");
  uint64_t end = begin;
  for (const SliceEntry& entry : entries) {
    if (entry.offset - address_ != end) refuse("whose slices do not lie one after the other");
    if (!may_hold(entry.dtype)) refuse("in an encoding that has to come over the stream");
    if (end > num_bytes_ || entry.num_bytes > num_bytes_ - end) refuse("beyond its end");
    end += entry.num_bytes;
  }
  if (end == begin) refuse("without bytes");
  {
    const MutexLock lock(mutex_);
    if (present_ && !present_->populate(begin, end - begin)) {
      throw Error(ErrorCode::OVERLOADED, "no memory for what was pushed through shared memory");
    }
  }
  return BufferRef::adopt(new Range(data_ + begin, end - begin, number), shared_from_this());
}

std::optional<uint64_t> PushArena::offset_of(const Buffer& range) const {
  const auto offset = static_cast<uint64_t>(range.data() - data_);
  return offset < num_bytes_ ? std::optional(offset) : std::nullopt;
}

void PushArena::release(Buffer* buffer) noexcept {
  auto* const range = static_cast<Range*>(buffer);
  const auto block = *offset_of(*range) / kPushBlockBytes;
  auto* const entry = reinterpret_cast<uint64_t*>(control_.data()) + block;
  // Release: whatever was read of the range was read before.
  std::atomic_ref<uint64_t>(*entry).store(range->number, std::memory_order_release);
  delete range;
}

}  // namespace psstore
