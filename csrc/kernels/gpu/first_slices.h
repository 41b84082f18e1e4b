// Writes the table of which slice each block of a launch begins in, slice after slice.
#pragma once

#include <cstdint>

#include "kernels/gpu/launch_map.h"

namespace psstore::gpu {

class FirstSlices {
 public:
  FirstSlices() = default;
  // `table`: a number for each block of the grid.
  FirstSlices(const Grid& grid, uint32_t* table) : grid_(grid), table_(table) {}

  // The next slice has so many chunks.
  void add(int64_t num_chunks) {
    num_chunks_ += num_chunks;
    for (; grid_.begin(num_blocks_) < num_chunks_; ++num_blocks_) table_[num_blocks_] = num_slices_;
    ++num_slices_;
  }
  // Of the slices so far.
  uint32_t num_slices() const { return num_slices_; }
  int64_t num_chunks() const { return num_chunks_; }

 private:
  Grid grid_;
  uint32_t* table_ = nullptr;
  uint32_t num_slices_ = 0;
  int64_t num_chunks_ = 0;
  int64_t num_blocks_ = 0;
};

}  // namespace psstore::gpu
