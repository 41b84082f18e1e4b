// Which file holds which update kernels.
#pragma once

#include "kernels/gpu/kernels.cuh"

namespace psstore::gpu {

// clang-format off
// sgd_cuda.cu
extern template void launch_update_async<SgdStep<float>>(SourceForm, const BatchView&, cudaStream_t);
extern template void launch_update_async<SgdMomentumStep<float>>(SourceForm, const BatchView&, cudaStream_t);

// adam_cuda.cu
extern template void launch_update_async<AdamStep<float>>(SourceForm, const BatchView&, cudaStream_t);
extern template void launch_update_async<AmsgradStep<float>>(SourceForm, const BatchView&, cudaStream_t);

// rules_cuda.cu
extern template void launch_update_async<AssignStep<float>>(SourceForm, const BatchView&, cudaStream_t);
extern template void launch_update_async<AddStep<float>>(SourceForm, const BatchView&, cudaStream_t);
extern template void launch_update_async<SgdFirstMomentumStep<float>>(SourceForm, const BatchView&, cudaStream_t);
extern template void launch_update_async<AdagradStep<float>>(SourceForm, const BatchView&, cudaStream_t);
extern template void launch_update_async<RmsPropStep<float>>(SourceForm, const BatchView&, cudaStream_t);
extern template void launch_update_async<RmsPropMomentumStep<float>>(SourceForm, const BatchView&, cudaStream_t);
extern template void launch_update_async<RmsPropCenteredStep<float>>(SourceForm, const BatchView&, cudaStream_t);
extern template void launch_update_async<RmsPropCenteredMomentumStep<float>>(SourceForm, const BatchView&, cudaStream_t);
extern template void launch_update_async<DelayedNesterovStep<float>>(SourceForm, const BatchView&, cudaStream_t);
extern template void launch_update_async<DelayedNesterovMomentumStep<float>>(SourceForm, const BatchView&, cudaStream_t);

// double_cuda.cu
extern template void launch_update_async<AssignStep<double>>(SourceForm, const BatchView&, cudaStream_t);
extern template void launch_update_async<AddStep<double>>(SourceForm, const BatchView&, cudaStream_t);
extern template void launch_update_async<SgdStep<double>>(SourceForm, const BatchView&, cudaStream_t);
extern template void launch_update_async<SgdFirstMomentumStep<double>>(SourceForm, const BatchView&, cudaStream_t);
extern template void launch_update_async<SgdMomentumStep<double>>(SourceForm, const BatchView&, cudaStream_t);
extern template void launch_update_async<AdamStep<double>>(SourceForm, const BatchView&, cudaStream_t);
extern template void launch_update_async<AmsgradStep<double>>(SourceForm, const BatchView&, cudaStream_t);
extern template void launch_update_async<AdagradStep<double>>(SourceForm, const BatchView&, cudaStream_t);
extern template void launch_update_async<RmsPropStep<double>>(SourceForm, const BatchView&, cudaStream_t);
extern template void launch_update_async<RmsPropMomentumStep<double>>(SourceForm, const BatchView&, cudaStream_t);
extern template void launch_update_async<RmsPropCenteredStep<double>>(SourceForm, const BatchView&, cudaStream_t);
extern template void launch_update_async<RmsPropCenteredMomentumStep<double>>(SourceForm, const BatchView&, cudaStream_t);
extern template void launch_update_async<DelayedNesterovStep<double>>(SourceForm, const BatchView&, cudaStream_t);
extern template void launch_update_async<DelayedNesterovMomentumStep<double>>(SourceForm, const BatchView&, cudaStream_t);
// clang-format on

}  // namespace psstore::gpu
