// Many copies: the table to the device, then one launch.
#include "kernels/gpu/copy_plan.h"
#include "kernels/gpu/kernels.cuh"

namespace psstore {

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
