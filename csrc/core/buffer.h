// Reference-counted, aligned memory: what payloads are received into and slots are made of.
//
// Ownership: a BufferRef owns one reference; the last one returns the memory to whom it came from, mostly
// a pool.
// Thread safety: references may be copied and dropped from any thread; the bytes are guarded by whoever
// shares the buffer (a slot's stripe lock). `unique()` is meaningful only under that lock.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "core/memory_budget.h"

namespace psstore {

class Buffer;

// Alignment of every buffer of a pool: a cache line, and the widest vector register.
inline constexpr size_t kBufferAlignment = 64;

// Whose memory a Buffer is. Lives as long as any of it is out.
class BufferOwner {
 public:
  virtual ~BufferOwner() = default;

 private:
  friend class BufferRef;
  // Whether nobody refers to its bytes otherwise than by it.
  virtual bool is_alone() const noexcept { return true; }
  // Nobody refers to `buffer` any more: its memory may be used again, the object is the owner's to free.
  // From any thread.
  virtual void release(Buffer* buffer) noexcept = 0;
};

class Buffer {
 public:
  // `capacity` bytes of which the first `size` are meant; one reference, which adopt() takes over.
  Buffer(std::byte* data, size_t size, size_t capacity)
      : data_(data), size_(size), capacity_(capacity) {}

  std::byte* data() { return data_; }
  const std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  friend class BufferPool;
  friend class BufferRef;
  friend class Whole;

  std::atomic<uint32_t> references_{1};
  std::atomic<uint32_t> parts_{0};  // of these references: by part_of()
  std::byte* data_;
  size_t size_;      // bytes asked for
  size_t capacity_;  // bytes there are: those of the pool's size class
  std::shared_ptr<BufferOwner>
      owner_;                    // null while it is idle in a pool, which it would keep alive
  Buffer* next_idle_ = nullptr;  // in a pool's list
  bool from_source_ = false;     // its bytes are not beside these fields
};

// Has so many bytes on their way from memory, for who comes to them soon. Inlined at any price, as all that does no more
// than this: GCC takes a function that only fetches for one without effect, and leaves out its calls.
[[gnu::always_inline]] inline void fetch_lines(const void* data, size_t num_bytes) {
  const auto* bytes = static_cast<const std::byte*>(data);
  for (size_t at = 0; at < num_bytes; at += kBufferAlignment) __builtin_prefetch(bytes + at);
}

// An owning pointer to a Buffer; copying it shares the buffer. Empty by default.
class BufferRef {
 public:
  BufferRef() = default;
  BufferRef(const BufferRef& other);
  BufferRef(BufferRef&& other) noexcept : buffer_(std::exchange(other.buffer_, nullptr)) {}
  BufferRef& operator=(BufferRef other) noexcept {
    std::swap(buffer_, other.buffer_);
    return *this;
  }
  ~BufferRef();

  Buffer* operator->() const { return buffer_; }
  Buffer& operator*() const { return *buffer_; }
  Buffer* get() const { return buffer_; }
  explicit operator bool() const { return buffer_ != nullptr; }

  // Has the buffer's fields on their way from memory, and so many bytes behind them: in a small block of
  // a pool they are its own first ones. REQUIRES: not empty.
  [[gnu::always_inline]] void fetch(size_t num_bytes) const {
    fetch_lines(buffer_, sizeof *buffer_ + num_bytes);
  }

  // The first reference to `buffer`, whose memory is the owner's.
  static BufferRef adopt(Buffer* buffer, std::shared_ptr<BufferOwner> owner);

  // True if nobody else refers to these bytes: by another reference, or, if they are part_of() others, to all of them.
  // Acquire: what other holders did to the bytes happened before.
  bool unique() const;

 private:
  explicit BufferRef(Buffer* buffer) : buffer_(buffer) {}
  Buffer* buffer_ = nullptr;
};

// A range of a buffer as a buffer of its own, which keeps the whole. REQUIRES: it lies within it.
BufferRef part_of(BufferRef whole, size_t offset, size_t num_bytes);

// Where a pool gets its large blocks from, if not from the heap. Thread-safe.
class BlockSource {
 public:
  virtual ~BlockSource() = default;
  // `num_bytes` that can be touched without fail, aligned to kBufferAlignment; nullptr if there are none.
  virtual std::byte* take(size_t num_bytes) noexcept = 0;
  // REQUIRES: `block` came from take(num_bytes).
  virtual void give_back(std::byte* block, size_t num_bytes) noexcept = 0;
};

// One whose blocks other processes can look at.
class SharedSource : public BlockSource {
 public:
  // Where it lies, as they are told; nullopt if it is none of the source's.
  virtual std::optional<uint64_t> offset_of(const std::byte* data) const = 0;
};

// From here on a block comes from the pool's source, if it has one.
inline constexpr size_t kLargeBlockBytes = 64 << 10;

// Keeps freed memory by size class, so that a steady stream of frames costs no page faults.
// Thread-safe.
class BufferPool : public BufferOwner, public std::enable_shared_from_this<BufferPool> {
 public:
  // `max_idle_bytes`: freed memory kept for reuse, if it was not in use lately; beyond it memory goes back to where
  // it came from.
  // `large`: where large blocks come from; what it can't give is from the heap, like all others.
  // `budget`: what is handed out is taken from it; null: there is no limit.
  static std::shared_ptr<BufferPool> create(size_t max_idle_bytes,
                                            std::shared_ptr<BlockSource> large = nullptr,
                                            std::shared_ptr<MemoryBudget> budget = nullptr);
  // Blocks of `from_bytes` or more come from `source`. What it can't give is from the heap if `or_heap`, else
  // std::bad_alloc.
  static std::shared_ptr<BufferPool> create_over(size_t max_idle_bytes,
                                                 std::shared_ptr<BlockSource> source, bool or_heap,
                                                 std::shared_ptr<MemoryBudget> budget = nullptr,
                                                 size_t from_bytes = 0);
  ~BufferPool() override;
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  // Contents are undefined. Throws std::bad_alloc, and what the budget throws. `size` 0 is allowed.
  // `reserved_bytes`: as many of them are taken from the budget already.
  BufferRef allocate(size_t size, uint64_t reserved_bytes = 0);
  // What allocate(size) takes from the budget. Throws std::bad_alloc.
  static size_t block_bytes(size_t size);

  // What it hands out is taken from it; null: there is no limit.
  MemoryBudget* budget() const;

  // Whether it came from here.
  bool owns(const Buffer& buffer) const { return buffer.owner_.get() == this; }

  // Gives all that is kept for reuse back to where it came from.
  void free_idle() noexcept;
  // Gives back what nobody needed since the last call: of each size, as many blocks as were idle all the time.
  // Stops after the one that makes it `max_bytes`, or a share of what is idle; the rest has to lie unused once more.
  // For somebody to call every few seconds. From the first call on the pool keeps as much as was in use at a time
  // since the last call but one, however much that is: the next round needs it again.
  void free_unused(size_t max_bytes) noexcept;

  // What is handed out and what is kept for reuse, in bytes of memory (whole size classes).
  size_t bytes_in_use() const;
  size_t bytes_idle() const;

 private:
  // Where blocks come from.
  struct Blocks {
    std::shared_ptr<BlockSource> source;   // null: the heap, all
    size_t from_bytes = kLargeBlockBytes;  // smaller ones are the heap's
    bool or_heap = true;
  };

  BufferPool(size_t max_idle_bytes, Blocks blocks, std::shared_ptr<MemoryBudget> budget);
  Buffer* new_block(size_t capacity);
  Buffer* allocate_block(size_t capacity);
  void free_block(Buffer* buffer) noexcept;
  void release(Buffer* buffer) noexcept override;

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace psstore
