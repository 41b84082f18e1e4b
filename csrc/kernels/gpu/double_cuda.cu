// The update kernels of float64 tensors.
#include "kernels/gpu/kernels.cuh"

namespace psstore::gpu {

// clang-format off
template void launch_update_async<AssignStep<double>>(SourceForm, const BatchView&, cudaStream_t);
template void launch_update_async<AddStep<double>>(SourceForm, const BatchView&, cudaStream_t);
template void launch_update_async<SgdStep<double>>(SourceForm, const BatchView&, cudaStream_t);
template void launch_update_async<SgdFirstMomentumStep<double>>(SourceForm, const BatchView&, cudaStream_t);
template void launch_update_async<SgdMomentumStep<double>>(SourceForm, const BatchView&, cudaStream_t);
template void launch_update_async<AdamStep<double>>(SourceForm, const BatchView&, cudaStream_t);
template void launch_update_async<AmsgradStep<double>>(SourceForm, const BatchView&, cudaStream_t);
template void launch_update_async<AdagradStep<double>>(SourceForm, const BatchView&, cudaStream_t);
template void launch_update_async<RmsPropStep<double>>(SourceForm, const BatchView&, cudaStream_t);
template void launch_update_async<RmsPropMomentumStep<double>>(SourceForm, const BatchView&, cudaStream_t);
template void launch_update_async<RmsPropCenteredStep<double>>(SourceForm, const BatchView&, cudaStream_t);
template void launch_update_async<RmsPropCenteredMomentumStep<double>>(SourceForm, const BatchView&, cudaStream_t);
template void launch_update_async<DelayedNesterovStep<double>>(SourceForm, const BatchView&, cudaStream_t);
template void launch_update_async<DelayedNesterovMomentumStep<double>>(SourceForm, const BatchView&, cudaStream_t);
// clang-format on

}  // namespace psstore::gpu
