#include "kernels/gpu/encode_plan.h"

#include <algorithm>

#include "kernels/gpu/first_slices.h"

namespace psstore::gpu {

EncodePlan::EncodePlan(std::span<const ToEncode> batch) {
  slices_.reserve(batch.size());
  for (const ToEncode& what : batch) {
    if (what.encoding == DType::kTopK) continue;
    slices_.push_back({what, grid_.num_chunks});
    grid_.num_chunks += slices_.back().num_chunks();
  }
  first_slices_ = slices_.size() * sizeof(EncodeSlice);
}

void EncodePlan::write(std::byte* table) const {
  std::ranges::copy(slices_, reinterpret_cast<EncodeSlice*>(table));
  FirstSlices blocks(grid_, reinterpret_cast<uint32_t*>(table + first_slices_));
  for (const EncodeSlice& slice : slices_) blocks.add(slice.num_chunks());
}

EncodeView EncodePlan::view(const std::byte* table) const {
  return {reinterpret_cast<const EncodeSlice*>(table),
          reinterpret_cast<const uint32_t*>(table + first_slices_)};
}

}  // namespace psstore::gpu
