// Slices to encode made a launch and a table of descriptors: all that the host does for them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/gpu/encode_body.h"

namespace psstore::gpu {

class EncodePlan {
 public:
  // Of all slices but those of topk, which need launches of their own.
  explicit EncodePlan(std::span<const ToEncode> batch);

  uint64_t num_bytes() const { return first_slices_ + num_blocks() * sizeof(uint32_t); }
  uint64_t num_blocks() const { return static_cast<uint64_t>(grid_.num_blocks()); }
  // The table, to `table`; of num_bytes(), aligned to 16.
  void write(std::byte* table) const;
  // Of the table that lies at `table` when the launch begins.
  EncodeView view(const std::byte* table) const;

 private:
  std::vector<EncodeSlice> slices_;
  Grid grid_;              // of a chunk for each block
  uint64_t first_slices_;  // offset: after the slices
};

}  // namespace psstore::gpu
