// Tables of launches to the device; many copies: the table, then one launch.
#include "kernels/gpu/copy_plan.h"
#include "kernels/gpu/kernels.cuh"
#include "kernels/gpu/table_body.h"

namespace psstore {

void gpu::copy_table_async(std::byte* device, const std::byte* pinned, size_t num_bytes,
                           cudaStream_t stream) {
  const TableBody body = TableBody::of(device, pinned, num_bytes);
  launch_async(body, body.num_blocks(), "copy of descriptors to the device", stream);
}

void cuda_copy_pieces_async(std::span<const CopyPiece> pieces, LaunchMemorySource& source,
                            CudaStream stream) {
  const gpu::CopyPlan plan(pieces);
  const LaunchMemory memory = source.take(plan.num_bytes());
  plan.write(memory.pinned);
  gpu::copy_table_async(memory.device, memory.pinned, plan.num_bytes(), stream);
  launch_async(gpu::CopyBody{plan.view(memory.device)}, static_cast<int64_t>(plan.num_blocks()),
               "copy pieces", stream);
}

}  // namespace psstore
