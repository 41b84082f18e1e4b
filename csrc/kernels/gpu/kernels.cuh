// How a body becomes a kernel, and how it is launched.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "core/errors.h"
#include "kernels/batch_cuda.h"
#include "kernels/gpu/block.h"
#include "kernels/gpu/update_body.h"
#include "kernels/gpu/variants.h"

namespace psstore::gpu {

// Throws Error(DEVICE_FAILED) that names the call and CUDA's reason: a launch also reports what failed before it.
inline void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // clears it, if it can be cleared
  throw Error(ErrorCode::DEVICE_FAILED, std::string(call) + ": " + cudaGetErrorString(status));
}

template <class Body>
__global__ void __launch_bounds__(kThreads, Body::kMinBlocks) run_on_device(const Body body) {
  __shared__ typename Body::Shared shared;
  typename Body::Local local;
  const int num_phases = body.num_phases(blockIdx.x);
  for (int phase = 0; phase < num_phases; ++phase) {
    if (phase > 0) __syncthreads();
    body.run(phase, blockIdx.x, static_cast<int>(threadIdx.x), local, shared);
  }
}

// Puts it into the stream; a grid of no blocks is no launch.
template <class Body>
void launch_async(const Body& body, int64_t num_blocks, const char* name, cudaStream_t stream) {
  if (num_blocks == 0) return;
  run_on_device<Body><<<static_cast<unsigned>(num_blocks), kThreads, 0, stream>>>(body);
  check(cudaGetLastError(), name);
}

// Brings what a launch reads of the host to the device. Not by a copy engine: there it would wait for all copies of
// other streams that are queued by then, and with it whatever they are to overlap with.
void copy_table_async(std::byte* device, const std::byte* pinned, size_t num_bytes,
                      cudaStream_t stream);

// Launches the kernel of the form `Step` that reads such sources. The forms' kernels are spread over several
// *_cuda.cu files by explicit instantiation, so that they are compiled at the same time.
template <class Step>
void launch_update_async(SourceForm form, const BatchView& batch, cudaStream_t stream) {
  with_sources<Step>(form, [&](auto type) {
    using Sources = typename decltype(type)::type;
    launch_async(UpdateBody<Step, Sources>{batch}, batch.grid.num_blocks(), "reduce_update",
                 stream);
  });
}

}  // namespace psstore::gpu
