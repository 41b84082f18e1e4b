// The pool. A block of the heap is one allocation: the Buffer's own fields, padded to the alignment, then
// its bytes. The fields of a block of the source are elsewhere: others may look at that memory.
//
// Size classes step by a quarter of a power of two (256, 320, 384, 448, 512, 640, …): a block is at
// most 25 % larger than what was asked for, and a freed one fits the next frame of nearly its size.
#include "core/buffer.h"

#include <algorithm>
#include <array>
#include <bit>
#include <memory>
#include <new>
#include <utility>

#include "core/mutex.h"

namespace psstore {
namespace {

constexpr size_t kSmallestClassBytes = 256;
constexpr size_t kStepsPerDoubling = 4;
constexpr int kSmallestExponent = std::countr_zero(kSmallestClassBytes);
constexpr int kLargestExponent = 47;  // an x86-64 or aarch64 process can address no more
constexpr size_t kNumClasses = kStepsPerDoubling * (kLargestExponent - kSmallestExponent) + 1;
static_assert(kSmallestClassBytes / kStepsPerDoubling % kBufferAlignment == 0);

struct SizeClass {
  size_t index;
  size_t capacity;
};

SizeClass size_class_of(size_t size) {
  if (size <= kSmallestClassBytes) return {0, kSmallestClassBytes};
  if (size > size_t{1} << kLargestExponent) throw std::bad_alloc();
  // 2^exponent < size <= 2^(exponent + 1)
  const auto exponent = static_cast<int>(std::bit_width(size - 1)) - 1;
  const size_t step = (size_t{1} << exponent) / kStepsPerDoubling;
  const size_t steps = (size + step - 1) / step;  // 5 to 8
  const auto doublings = static_cast<size_t>(exponent - kSmallestExponent);
  return {doublings * kStepsPerDoubling + steps - kStepsPerDoubling, steps * step};
}

// Of what is idle at most so much is given back at a time: half of a burst is gone after 22 times.
constexpr size_t kUnusedShare = 32;

constexpr size_t kBlockHeaderBytes =
    (sizeof(Buffer) + kBufferAlignment - 1) / kBufferAlignment * kBufferAlignment;

constexpr std::align_val_t kHeapAlignment{kBufferAlignment};

}  // namespace

// ---- BufferRef --------------------------------------------------------------------------------------

BufferRef::BufferRef(const BufferRef& other) : buffer_(other.buffer_) {
  // Relaxed: whoever copies holds a reference already, so the count can't reach zero meanwhile.
  if (buffer_ != nullptr) buffer_->references_.fetch_add(1, std::memory_order_relaxed);
}

BufferRef::~BufferRef() {
  if (buffer_ == nullptr) return;
  if (buffer_->references_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  const std::shared_ptr<BufferOwner> owner =
      std::move(buffer_->owner_);  // lives until release is over
  owner->release(buffer_);
}

BufferRef BufferRef::adopt(Buffer* buffer, std::shared_ptr<BufferOwner> owner) {
  buffer->owner_ = std::move(owner);
  return BufferRef(buffer);
}

bool BufferRef::unique() const {
  return buffer_ != nullptr && buffer_->references_.load(std::memory_order_acquire) == 1 &&
         buffer_->owner_->is_alone();
}

class Whole : public BufferOwner {
 public:
  explicit Whole(BufferRef whole) : whole_(std::move(whole)) { ++whole_->parts_; }
  Whole(const Whole&) = delete;
  Whole& operator=(const Whole&) = delete;
  ~Whole() override { --whole_->parts_; }

 private:
  // Nobody but its parts refers to the whole.
  bool is_alone() const noexcept override {
    return whole_->references_.load(std::memory_order_acquire) == whole_->parts_.load();
  }
  void release(Buffer* part) noexcept override { delete part; }

  BufferRef whole_;
};

BufferRef part_of(BufferRef whole, size_t offset, size_t num_bytes) {
  auto part = std::make_unique<Buffer>(whole->data() + offset, num_bytes, num_bytes);
  auto owner = std::make_shared<Whole>(std::move(whole));
  return BufferRef::adopt(part.release(), std::move(owner));
}

// ---- BufferPool -------------------------------------------------------------------------------------

struct BufferPool::State {
  // Of one size class. Last in, first out, so that what is handed out next is likely still in the cache.
  struct Idle {
    Buffer* latest = nullptr;
    size_t count = 0;
    size_t num_unused = 0;  // the fewest that there were since take_unused() was called last
  };

  const size_t max_idle_bytes;
  const Blocks blocks;
  const std::shared_ptr<MemoryBudget> budget;  // null: no limit
  std::atomic<size_t> bytes_in_use{0};

  mutable Mutex mutex;
  std::array<Idle, kNumClasses> idle GUARDED_BY(mutex){};
  size_t bytes_idle GUARDED_BY(mutex) = 0;
  // Until take_unused() is called first, nobody would give back what is kept because it was needed once.
  bool is_looked_after GUARDED_BY(mutex) = false;
  size_t most_since GUARDED_BY(mutex) = 0;   // in use at a time since its last call,
  size_t most_before GUARDED_BY(mutex) = 0;  // and between that and the one before

  State(size_t max_idle, Blocks from, std::shared_ptr<MemoryBudget> within)
      : max_idle_bytes(max_idle), blocks(std::move(from)), budget(std::move(within)) {}

  Buffer* take_idle(const SizeClass& size_class);
  // As a list; the largest classes first.
  Buffer* take_unused(size_t max_bytes) noexcept;
  // False if so much is idle already that the block should go back to the system. `were_in_use`: bytes, with it.
  bool keep_idle(Buffer* buffer, const SizeClass& size_class, size_t were_in_use) noexcept;

 private:
  Buffer* take_latest(Idle& of_class) REQUIRES(mutex);
};

Buffer* BufferPool::State::take_latest(Idle& of_class) {
  Buffer* const taken = std::exchange(of_class.latest, of_class.latest->next_idle_);
  of_class.num_unused = std::min(of_class.num_unused, --of_class.count);
  bytes_idle -= taken->capacity_;
  return taken;
}

Buffer* BufferPool::State::take_idle(const SizeClass& size_class) {
  const MutexLock lock(mutex);
  Idle& of_class = idle[size_class.index];
  return of_class.latest == nullptr ? nullptr : take_latest(of_class);
}

Buffer* BufferPool::State::take_unused(size_t max_bytes) noexcept {
  const MutexLock lock(mutex);
  is_looked_after = true;
  most_before = std::exchange(most_since, bytes_in_use.load(std::memory_order_relaxed));
  max_bytes = std::max(max_bytes, bytes_idle / kUnusedShare);
  Buffer* taken = nullptr;
  size_t num_bytes = 0;
  for (auto of_class = idle.rbegin(); of_class != idle.rend(); ++of_class) {
    for (size_t left = of_class->num_unused; left > 0 && num_bytes < max_bytes; --left) {
      Buffer* const buffer = take_latest(*of_class);
      num_bytes += buffer->capacity_;
      buffer->next_idle_ = std::exchange(taken, buffer);
    }
    of_class->num_unused = of_class->count;
  }
  return taken;
}

bool BufferPool::State::keep_idle(Buffer* buffer, const SizeClass& size_class,
                                  size_t were_in_use) noexcept {
  const MutexLock lock(mutex);
  most_since = std::max(most_since, were_in_use);  // it is largest before something is released
  const size_t all = were_in_use + bytes_idle;
  size_t needed = were_in_use - size_class.capacity;
  if (is_looked_after) needed = std::max({needed, most_since, most_before});
  if (all > needed && all - needed > max_idle_bytes) return false;
  if (budget && bytes_idle + size_class.capacity > budget->left_bytes()) return false;
  Idle& of_class = idle[size_class.index];
  buffer->next_idle_ = std::exchange(of_class.latest, buffer);
  ++of_class.count;
  bytes_idle += size_class.capacity;
  return true;
}

BufferPool::BufferPool(size_t max_idle_bytes, Blocks blocks, std::shared_ptr<MemoryBudget> budget)
    : state_(std::make_unique<State>(max_idle_bytes, std::move(blocks), std::move(budget))) {}

std::shared_ptr<BufferPool> BufferPool::create(size_t max_idle_bytes,
                                               std::shared_ptr<BlockSource> large,
                                               std::shared_ptr<MemoryBudget> budget) {
  return std::shared_ptr<BufferPool>(
      new BufferPool(max_idle_bytes, {std::move(large)}, std::move(budget)));
}

std::shared_ptr<BufferPool> BufferPool::create_over(size_t max_idle_bytes,
                                                    std::shared_ptr<BlockSource> source,
                                                    bool or_heap,
                                                    std::shared_ptr<MemoryBudget> budget,
                                                    size_t from_bytes) {
  return std::shared_ptr<BufferPool>(
      new BufferPool(max_idle_bytes, {std::move(source), from_bytes, or_heap}, std::move(budget)));
}

BufferPool::~BufferPool() {
  free_idle();
}

void BufferPool::free_idle() noexcept {
  free_unused(0);  // from now on all that is idle counts as unused
  free_unused(SIZE_MAX);
}

void BufferPool::free_unused(size_t max_bytes) noexcept {
  Buffer* unused = state_->take_unused(max_bytes);
  while (unused != nullptr) free_block(std::exchange(unused, unused->next_idle_));
}

Buffer* BufferPool::allocate_block(size_t capacity) {
  const Blocks& blocks = state_->blocks;
  if (blocks.source != nullptr && capacity >= blocks.from_bytes) {
    void* const header = ::operator new(kBlockHeaderBytes, kHeapAlignment);
    if (std::byte* const data = blocks.source->take(capacity)) {
      auto* const buffer = new (header) Buffer(data, 0, capacity);
      buffer->from_source_ = true;
      return buffer;
    }
    ::operator delete(header, kHeapAlignment);
    if (!blocks.or_heap) throw std::bad_alloc();
  }
  void* const block = ::operator new(kBlockHeaderBytes + capacity, kHeapAlignment);
  return new (block) Buffer(static_cast<std::byte*>(block) + kBlockHeaderBytes, 0, capacity);
}

void BufferPool::free_block(Buffer* buffer) noexcept {
  if (buffer->from_source_) state_->blocks.source->give_back(buffer->data_, buffer->capacity_);
  std::destroy_at(buffer);
  ::operator delete(static_cast<void*>(buffer), kHeapAlignment);
}

size_t BufferPool::block_bytes(size_t size) {
  return size_class_of(size).capacity;
}

// What lies idle is none of the sizes that are asked for, and may be in the way.
Buffer* BufferPool::new_block(size_t capacity) {
  if (budget() != nullptr && bytes_idle() > budget()->left_bytes()) free_idle();
  return allocate_block(capacity);
}

BufferRef BufferPool::allocate(size_t size, uint64_t reserved_bytes) {
  const SizeClass size_class = size_class_of(size);
  MemoryBudget* const budget = this->budget();
  const uint64_t to_take =
      size_class.capacity - std::min<uint64_t>(reserved_bytes, size_class.capacity);
  if (budget != nullptr) budget->take(to_take);
  Buffer* buffer = state_->take_idle(size_class);
  try {
    if (buffer == nullptr) buffer = new_block(size_class.capacity);
  } catch (...) {
    if (budget != nullptr) budget->give_back(to_take);
    throw;
  }
  buffer->size_ = size;
  buffer->references_.store(1, std::memory_order_relaxed);
  state_->bytes_in_use.fetch_add(size_class.capacity, std::memory_order_relaxed);
  return BufferRef::adopt(buffer, shared_from_this());
}

MemoryBudget* BufferPool::budget() const {
  return state_->budget.get();
}

void BufferPool::release(Buffer* buffer) noexcept {
  const SizeClass size_class = size_class_of(buffer->capacity_);
  const size_t were_in_use =
      state_->bytes_in_use.fetch_sub(size_class.capacity, std::memory_order_relaxed);
  if (state_->budget) state_->budget->give_back(size_class.capacity);
  if (!state_->keep_idle(buffer, size_class, were_in_use)) free_block(buffer);
}

size_t BufferPool::bytes_in_use() const {
  return state_->bytes_in_use.load(std::memory_order_relaxed);
}

size_t BufferPool::bytes_idle() const {
  const MutexLock lock(state_->mutex);
  return state_->bytes_idle;
}

}  // namespace psstore
