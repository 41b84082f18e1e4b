// Pieces to copy made a launch and a table of descriptors: all that the host does for them.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/gpu/copy_body.h"
#include "kernels/pieces.h"

namespace psstore::gpu {

class CopyPlan {
 public:
  // Refers to the pieces.
  explicit CopyPlan(std::span<const CopyPiece> pieces);

  uint64_t num_bytes() const { return first_slices_ + num_blocks() * sizeof(uint32_t); }
  uint64_t num_blocks() const { return static_cast<uint64_t>(grid_.num_blocks()); }
  // The table, to `table`; of num_bytes(), aligned to 16.
  void write(std::byte* table) const;
  // Of the table that lies at `table` when the launch begins.
  CopyView view(const std::byte* table) const;

 private:
  const std::span<const CopyPiece> pieces_;
  Grid grid_;
  uint64_t first_slices_;  // offset: after the slices
};

}  // namespace psstore::gpu
