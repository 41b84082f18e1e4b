// The fused pass on a GPU: one thread reduces one element's gradients in rank order and steps it by the
// arithmetic of csrc/rules, compiled without contraction, so that it gives the CPU kernels' bytes.
#include <algorithm>
#include <optional>

#include "device/cuda.h"
#include "kernels/update_cuda.h"
#include "rules/sgd.h"

namespace psstore {
namespace {

struct DeviceGradient {
  const float* data;  // (num_elems,), device memory
  float weight;
};

// Device memory; a view, so that a kernel can be given it by value.
struct DeviceUpdate {
  int64_t num_elems;
  float* value;                     // (num_elems,)
  float* momentum_buffer;           // (num_elems,) or null
  const DeviceGradient* gradients;  // (num_gradients,)
  int num_gradients;
  float divisor;
};

// sum += w*g, each product and each sum rounded by itself. The sum starts at -0, which added to any x
// gives x, unless there is nothing to add.
__device__ float reduce(const DeviceUpdate& update, int64_t i) {
  float sum = update.num_gradients == 0 ? 0.0F : -0.0F;
  for (int k = 0; k < update.num_gradients; ++k) {
    sum = sum + update.gradients[k].weight * update.gradients[k].data[i];
  }
  return update.divisor == 1.0F ? sum : sum / update.divisor;
}

// A grid-stride loop: neighbouring threads touch neighbouring elements, any grid covers any slice.
template <class Step>
__device__ void for_each_element(int64_t num_elems, Step step) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t start = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int64_t i = start; i < num_elems; i += stride) step(i);
}

__global__ void reduce_sgd(DeviceUpdate update, Sgd<float> sgd) {
  for_each_element(update.num_elems, [&](int64_t i) {
    update.value[i] = sgd.step(update.value[i], reduce(update, i));
  });
}

__global__ void reduce_sgd_first_momentum(DeviceUpdate update, Sgd<float> sgd) {
  for_each_element(update.num_elems, [&](int64_t i) {
    update.value[i] = sgd.first_step(update.value[i], reduce(update, i), update.momentum_buffer[i]);
  });
}

__global__ void reduce_sgd_momentum(DeviceUpdate update, Sgd<float> sgd) {
  for_each_element(update.num_elems, [&](int64_t i) {
    update.value[i] = sgd.step(update.value[i], reduce(update, i), update.momentum_buffer[i]);
  });
}

// A streaming kernel: blocks of 256 keep any device's multiprocessors full, and 4096 of them are more
// than any has room for at once; the loop does the rest.
void launch_async(const DeviceUpdate& update, const Sgd<float>& sgd, bool first_step,
                  cudaStream_t stream) {
  constexpr int64_t kThreads = 256;
  constexpr int64_t kMaxBlocks = 4096;
  const int64_t blocks = std::min(kMaxBlocks, (update.num_elems + kThreads - 1) / kThreads);
  auto* kernel = update.momentum_buffer == nullptr ? reduce_sgd
                 : first_step                      ? reduce_sgd_first_momentum
                                                   : reduce_sgd_momentum;
  kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(kThreads), 0, stream>>>(update,
                                                                                        sgd);
  device::check(cudaGetLastError(), "launch of reduce_sgd");
}

}  // namespace

const bool kCudaCompiled = true;

int cuda_device_count() {
  int count = 0;
  // Without a driver or a device this is an error; to us it is the answer 0.
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();  // clears it: later calls would report it as theirs
    return 0;
  }
  return count;
}

void cuda_reduce_sgd(const CudaSgdUpdate& update) {
  if (cuda_device_count() == 0) {
    throw Error(ErrorCode::INTERNAL, "no CUDA device: check nvidia-smi and the driver's version");
  }
  if (update.num_elems == 0) return;
  device::check(cudaSetDevice(0), "cudaSetDevice");
  const device::Stream stream;
  device::Array<float> value(update.value, update.num_elems, stream.get());
  std::optional<device::Array<float>> momentum_buffer;
  if (update.momentum_buffer != nullptr) {
    momentum_buffer.emplace(update.momentum_buffer, update.num_elems, stream.get());
  }
  std::vector<device::Array<float>> gradients;
  std::vector<DeviceGradient> views;
  for (const HostGradient& gradient : update.gradients) {
    gradients.emplace_back(gradient.data, update.num_elems, stream.get());
    views.push_back({gradients.back().data(), gradient.weight});
  }
  const auto num_gradients = static_cast<int64_t>(views.size());
  const device::Array<DeviceGradient> device_views(views.data(), num_gradients, stream.get());
  launch_async({.num_elems = update.num_elems,
                .value = value.data(),
                .momentum_buffer = momentum_buffer ? momentum_buffer->data() : nullptr,
                .gradients = device_views.data(),
                .num_gradients = static_cast<int>(num_gradients),
                .divisor = static_cast<float>(update.divisor)},
               Sgd<float>(*update.hyper), update.first_step, stream.get());
  value.copy_to_async(update.value, stream.get());
  if (momentum_buffer) momentum_buffer->copy_to_async(update.momentum_buffer, stream.get());
  stream.synchronize();
}

}  // namespace psstore
