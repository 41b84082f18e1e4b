// The update kernels of SGD.
#include "kernels/gpu/kernels.cuh"

namespace psstore::gpu {

// clang-format off
template void launch_update_async<SgdStep<float>>(SourceForm, const BatchView&, cudaStream_t);
template void launch_update_async<SgdMomentumStep<float>>(SourceForm, const BatchView&, cudaStream_t);
// clang-format on

}  // namespace psstore::gpu
