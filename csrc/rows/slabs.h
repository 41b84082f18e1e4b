// Slabs of records: where each row's is, and whose the slabs are.
//
//   slab     record record record …        16 KiB of records, or one that is larger
//
// Who reads a snapshot has references to the slabs that it is of, and what is to be changed is copied first if somebody
// has. Not thread-safe; copies of it that were lent are anybody's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/buffer.h"
#include "rows/row_index.h"

namespace psstore {

// A block of a pool.
inline constexpr size_t kSlabBytes = 16u << 10;

// How numbers of rows, slabs and records belong together: the low bits of a number are the place in its slab.
class SlabLayout {
 public:
  explicit SlabLayout(size_t record_bytes);

  size_t record_bytes() const { return record_bytes_; }
  size_t slab_bytes() const { return rows_per_slab_ * record_bytes_; }
  size_t rows_per_slab() const { return rows_per_slab_; }
  size_t slab_of(RowNumber row) const { return row >> place_bits_; }
  size_t offset_of(RowNumber row) const {
    return (row & ((RowNumber{1} << place_bits_) - 1)) * record_bytes_;
  }
  // Of the row in the n-th place.
  RowNumber number(size_t n) const {
    return static_cast<RowNumber>(n / rows_per_slab_ << place_bits_ | n % rows_per_slab_);
  }
  size_t place_of(RowNumber row) const {
    return slab_of(row) * rows_per_slab_ + (row & ((RowNumber{1} << place_bits_) - 1));
  }
  size_t num_slabs(size_t num_rows) const {
    return (num_rows + rows_per_slab_ - 1) / rows_per_slab_;
  }

 private:
  size_t record_bytes_;
  size_t rows_per_slab_;
  int place_bits_;
};

// Where a slab begins, and whether it was lent, is kept beside the references to it: to look a row up, and to change it,
// waits for no memory but the row's own.
class Slabs {
 public:
  size_t size() const { return buffers_.size(); }
  std::byte* begin_of(size_t slab) const { return begins_[slab]; }
  // Has where it begins on its way from memory.
  [[gnu::always_inline]] void fetch_begin_of(size_t slab) const {
    __builtin_prefetch(&begins_[slab]);
  }

  void add(BufferRef buffer) {
    begins_.push_back(buffer->data());
    buffers_.push_back(std::move(buffer));
    lent_.push_back(false);
  }
  void replace(size_t slab, BufferRef buffer) {
    begins_[slab] = buffer->data();
    buffers_[slab] = std::move(buffer);
    lent_[slab] = false;
  }
  // Lets go of all from there on.
  void shrink(size_t num_slabs) {
    buffers_.resize(num_slabs);
    begins_.resize(num_slabs);
    lent_.resize(num_slabs);
  }

  // Whether it is nobody else's.
  bool is_own(size_t slab) {
    if (lent_[slab] && buffers_[slab].unique()) lent_[slab] = false;
    return !lent_[slab];
  }
  // References to all of them for somebody who reads.
  Slabs lent() {
    lent_.assign(size(), true);
    return *this;
  }

 private:
  std::vector<BufferRef> buffers_;
  std::vector<std::byte*> begins_;
  std::vector<bool> lent_;  // since it was last seen to be nobody else's
};

}  // namespace psstore
