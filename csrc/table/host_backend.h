// Slots in this process's memory: all work is done at once, by the CPU's kernels.
#pragma once

#include <memory>
#include <utility>

#include "table/backend.h"

namespace psstore {

// Of main memory: what --max-memory says.
inline std::shared_ptr<MemoryBudget> host_budget(uint64_t max_bytes) {
  return std::make_shared<MemoryBudget>(
      max_bytes, "its host's memory",
      "raise --max-memory (of a LocalStore: max_memory), or use more shards "
      "on more machines");
}

// A slice that is less of its payload is copied out of it: what keeps one slice keeps the whole payload.
inline constexpr size_t kMaxSlicesPerKeptPayload = 4;

class HostBackend final : public Backend {
 public:
  // `arena`: where the pool's large blocks lie, for clients to read; null: nowhere. `rows`: what rows are in, out of
  // the same budget; null: `pool`.
  explicit HostBackend(std::shared_ptr<BufferPool> pool,
                       std::shared_ptr<const SharedSource> arena = nullptr,
                       std::shared_ptr<BufferPool> rows = nullptr)
      : pool_(std::move(pool)), arena_(std::move(arena)), rows_(std::move(rows)) {}

  BufferRef allocate(size_t num_bytes) override { return take(*pool_, num_bytes, 0); }
  BufferRef allocate_rows(size_t num_bytes) override;
  BufferRef allocate_reserved(size_t num_bytes, uint64_t& reserved_bytes) override;
  BufferRef allocate_payload(size_t num_bytes) override { return take(*pool_, num_bytes, 0); }
  BufferRef bring(const BufferRef& payload) override { return payload; }
  bool owns(const BufferRef& payload) const override { return pool_->owns(*payload); }
  BufferRef keep(const BufferRef& payload, size_t offset, size_t num_bytes) override;

  // Without a budget what the system can't give is told when it is asked for.
  void reserve(uint64_t num_bytes) override;
  void unreserve(uint64_t num_bytes) override;
  uint64_t footprint(size_t num_bytes) const override { return BufferPool::block_bytes(num_bytes); }
  bool counts_use() const override { return true; }
  void draw(size_t num_bytes, uint64_t& reserved_bytes) override;
  const MemoryBudget* budget() const override { return pool_->budget(); }

  void zero(void* memory, size_t num_bytes) override;
  void copy(void* to, const void* from, size_t num_bytes) override;
  void convert(DType from, DType to, const void* source, void* destination,
               int64_t num_elems) override;
  void reduce_update(const SliceUpdate& update) override;
  Sum reduced_squares(const SliceUpdate& update) override;
  bool encode_change(const void* base, const ToEncode& what) override;
  void flush() override {}

  Gathered gather(const std::vector<Finding>& findings) override;
  Gathered lend(const std::vector<Finding>& findings) override;
  std::optional<uint64_t> offset_of(const std::byte* data) const override;
  Gathered gather_sums(const std::vector<Sum>& sums) override;
  std::string bytes_of(const BufferRef& buffer, size_t num_bytes) override;
  bool works_at_once() const override { return true; }
  bool keeps_places() const override { return arena_ != nullptr; }
  const std::string& device() const override {
    static const std::string cpu = "cpu";
    return cpu;
  }
  size_t pool_bytes() const override {
    return pool_->bytes_in_use() + (rows_ ? rows_->bytes_in_use() : 0) + pool_idle_bytes();
  }
  size_t pool_idle_bytes() const override {
    return pool_->bytes_idle() + (rows_ ? rows_->bytes_idle() : 0);
  }
  void free_unused(size_t max_bytes) override {
    pool_->free_unused(max_bytes);
    if (rows_) rows_->free_unused(max_bytes);
  }

 private:
  static BufferRef take(BufferPool& from, size_t num_bytes, uint64_t reserved_bytes);

  const std::shared_ptr<BufferPool> pool_;
  const std::shared_ptr<const SharedSource> arena_;
  const std::shared_ptr<BufferPool> rows_;
};

}  // namespace psstore
