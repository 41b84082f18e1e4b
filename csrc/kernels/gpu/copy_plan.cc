#include "kernels/gpu/copy_plan.h"

#include "kernels/gpu/first_slices.h"

namespace psstore::gpu {
namespace {

CopySlice slice_of(const CopyPiece& piece) {
  return {.bytes = {.num_elems = static_cast<int64_t>(piece.num_bytes),
                    .vector_elems = kCopyVectorBytes,
                    .lead = lead_of(piece.to, 1)},
          .first_chunk = 0,
          .to = piece.to,
          .from = piece.from};
}

}  // namespace

CopyPlan::CopyPlan(std::span<const CopyPiece> pieces)
    : pieces_(pieces), first_slices_((pieces.size() + 1) * sizeof(CopySlice)) {
  int64_t num_chunks = 0;
  for (const CopyPiece& piece : pieces) num_chunks += slice_of(piece).num_chunks();
  grid_ = Grid::of(num_chunks);
}

void CopyPlan::write(std::byte* table) const {
  auto* slices = reinterpret_cast<CopySlice*>(table);
  FirstSlices blocks(grid_, reinterpret_cast<uint32_t*>(table + first_slices_));
  for (const CopyPiece& piece : pieces_) {
    *slices = slice_of(piece);
    slices->first_chunk = blocks.num_chunks();
    blocks.add(slices->num_chunks());
    ++slices;
  }
  *slices = CopySlice{};
  slices->first_chunk = blocks.num_chunks();
}

CopyView CopyPlan::view(const std::byte* table) const {
  return {reinterpret_cast<const CopySlice*>(table),
          reinterpret_cast<const uint32_t*>(table + first_slices_), grid_};
}

}  // namespace psstore::gpu
