// What codecs lost of the gradients of rows, by id: kept by who pushes, and added to what it pushes next.
//
// Bounded: where ids are more than there is room for, what was written longest ago is forgotten, as rows of a table that
// are evicted by "lru". What is forgotten is lost, which is one codec's loss of a row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "rows/recent_rows.h"

namespace psstore {

class RowResiduals {
 public:
  // REQUIRES: dim in [1, kMaxRowDim], max_rows in [1, kMaxRows].
  RowResiduals(uint32_t dim, size_t max_rows);

  size_t num_rows() const { return rows_.store().num_rows(); }
  uint32_t dim() const { return rows_.store().shape().dim; }

  // `residuals`: (ids, dim); zeros of ids that have none.
  void read(std::span<const uint64_t> ids, float* residuals) const;
  // What is kept of these ids from now on, of which none comes twice. Of more than max_rows the first are kept. Throws
  // Error(OUT_OF_MEMORY), with nothing changed but that some may be forgotten.
  void write(std::span<const uint64_t> ids, const float* residuals);

  // All of them, for who keeps them elsewhere. `residuals`: (num_rows, dim); `ages`: how many writes ago each was written.
  void copy(uint64_t* ids, float* residuals, uint32_t* ages) const;
  // Takes over what copy() gave. REQUIRES: there are none yet. Throws Error: BAD_ARGUMENT for an id that comes twice, or
  // more than max_rows; OUT_OF_MEMORY. Some of them may be here then.
  void load(std::span<const uint64_t> ids, const float* residuals, const uint32_t* ages);

 private:
  RecentRows rows_;
};

}  // namespace psstore
