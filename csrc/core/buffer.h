// Reference-counted, aligned memory from a pool: what payloads are received into and slots are made of.
//
// Ownership: a BufferRef owns one reference; the last one returns the memory to the pool it came from.
// Thread safety: references may be copied and dropped from any thread; the bytes are guarded by whoever
// shares the buffer (a slot's stripe lock). `unique()` is meaningful only under that lock.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace psstore {

class BufferPool;

// Alignment of every buffer: a cache line, and the widest vector register.
inline constexpr size_t kBufferAlignment = 64;

class Buffer {
 public:
  std::byte* data() { return data_; }
  const std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  friend class BufferPool;
  friend class BufferRef;
  Buffer() = default;

  std::atomic<uint32_t> references_{0};
  std::byte* data_ = nullptr;
  size_t size_ = 0;                   // bytes asked for
  size_t capacity_ = 0;               // bytes there are: those of the pool's size class
  std::shared_ptr<BufferPool> pool_;  // keeps the pool alive as long as its memory is out
};

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

  // True if no other reference exists. Acquire: what other holders did to the bytes happened before.
  bool unique() const;

 private:
  friend class BufferPool;
  explicit BufferRef(Buffer* buffer) : buffer_(buffer) {}
  Buffer* buffer_ = nullptr;
};

// Keeps freed memory by size class, so that a steady stream of frames costs no page faults.
// Thread-safe.
class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  // `max_idle_bytes`: freed memory kept for reuse; beyond it memory goes back to the system.
  static std::shared_ptr<BufferPool> create(size_t max_idle_bytes);
  ~BufferPool();
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  // Contents are undefined. Throws std::bad_alloc. `size` 0 is allowed.
  BufferRef allocate(size_t size);
  BufferRef allocate_zeroed(size_t size);

  // What is handed out and what is kept for reuse, in bytes of memory (whole size classes).
  size_t bytes_in_use() const;
  size_t bytes_idle() const;

 private:
  friend class BufferRef;
  explicit BufferPool(size_t max_idle_bytes);
  static Buffer* allocate_block(size_t capacity);
  void release(Buffer* buffer) noexcept;

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace psstore
