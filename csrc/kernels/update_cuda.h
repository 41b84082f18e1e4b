// The fused pass on a GPU, and whether there is one.
//
// Defined by update_cuda.cu where CMake builds with CUDA and by no_cuda.cc where it does not; includes
// nothing of CUDA, so that its callers need not know which.
#pragma once

#include <cstdint>
#include <vector>

#include "rules/hyper.h"

namespace psstore {

// Whether update_cuda.cu was compiled in.
extern const bool kCudaCompiled;

// Devices that can be used; 0 without a device, without a driver or without CUDA in the build.
int cuda_device_count();

// A gradient of `num_elems` floats in host memory.
struct HostGradient {
  const float* data;
  float weight;
};

// What reduce_update() does with rule sgd and dtype float32, all ranges in host memory.
struct CudaSgdUpdate {
  const Hyper* hyper;
  int64_t num_elems;
  float* value;
  float* momentum_buffer;               // null if the hyper-parameters have no momentum
  bool first_step;                      // momentum_buffer is uninitialised and becomes the gradient
  std::vector<HostGradient> gradients;  // in rank order
  double divisor;
};

// Copies to device 0, runs the kernel, copies back; blocks until done. Gives the bytes of the CPU
// kernels. Throws Error(INTERNAL) if there is no device or CUDA reports an error; then value and
// momentum_buffer are undefined.
void cuda_reduce_sgd(const CudaSgdUpdate& update);

}  // namespace psstore
