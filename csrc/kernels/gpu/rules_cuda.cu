// The update kernels of the other rules.
#include "kernels/gpu/kernels.cuh"

namespace psstore::gpu {

// clang-format off
template void launch_update_async<AssignStep<float>>(SourceForm, const BatchView&, cudaStream_t);
template void launch_update_async<AddStep<float>>(SourceForm, const BatchView&, cudaStream_t);
template void launch_update_async<SgdFirstMomentumStep<float>>(SourceForm, const BatchView&, cudaStream_t);
template void launch_update_async<AdagradStep<float>>(SourceForm, const BatchView&, cudaStream_t);
template void launch_update_async<RmsPropStep<float>>(SourceForm, const BatchView&, cudaStream_t);
template void launch_update_async<RmsPropMomentumStep<float>>(SourceForm, const BatchView&, cudaStream_t);
template void launch_update_async<RmsPropCenteredStep<float>>(SourceForm, const BatchView&, cudaStream_t);
template void launch_update_async<RmsPropCenteredMomentumStep<float>>(SourceForm, const BatchView&, cudaStream_t);
template void launch_update_async<DelayedNesterovStep<float>>(SourceForm, const BatchView&, cudaStream_t);
template void launch_update_async<DelayedNesterovMomentumStep<float>>(SourceForm, const BatchView&, cudaStream_t);
// clang-format on

}  // namespace psstore::gpu
