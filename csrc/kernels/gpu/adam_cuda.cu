// The update kernels of Adam and AdamW.
#include "kernels/gpu/kernels.cuh"

namespace psstore::gpu {

// clang-format off
template void launch_update_async<AdamStep<float>>(SourceForm, const BatchView&, cudaStream_t);
template void launch_update_async<AmsgradStep<float>>(SourceForm, const BatchView&, cudaStream_t);
// clang-format on

}  // namespace psstore::gpu
