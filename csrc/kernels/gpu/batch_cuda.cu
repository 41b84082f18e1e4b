// Batches of updates: the table to the device, then a launch for each variant.
#include "kernels/gpu/plan.h"
#include "kernels/gpu/squares_body.h"
#include "kernels/gpu/update_kernels.cuh"

namespace psstore {
namespace {

using gpu::BatchView;
using gpu::Launch;
using gpu::Plan;
using gpu::Purpose;
using gpu::Variant;

// Writes the table, puts its copy into the stream, and says where that will be.
const std::byte* prepare_async(const Plan& plan, LaunchMemorySource& source, CudaStream stream) {
  const LaunchMemory memory = source.take(plan.num_bytes());
  plan.write(memory.pinned);
  gpu::copy_table_async(memory.device, memory.pinned, plan.num_bytes(), stream);
  return memory.device;
}

template <class T>
void launch_update(const Variant& variant, const BatchView& view, CudaStream stream) {
  with_form<T>(variant.step, [&](auto type) {
    gpu::launch_update_async<typename decltype(type)::type>(variant.sources, view, stream);
  });
}

}  // namespace

const int kCudaVersion = CUDART_VERSION;

int cuda_device_count() {
  int count = 0;
  // Without a driver or a device this is an error; to us it is the answer 0.
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();  // clears it: later calls would report it as theirs
    return 0;
  }
  return count;
}

void cuda_reduce_update_async(std::span<const SliceUpdate> batch, LaunchMemorySource& memory,
                              CudaStream stream) {
  const Plan plan(Purpose::kUpdate, batch);
  const std::byte* const table = prepare_async(plan, memory, stream);
  plan.for_each_launch(table, [&](const Variant& variant, const Launch&, const BatchView& view) {
    variant.is_double ? launch_update<double>(variant, view, stream)
                      : launch_update<float>(variant, view, stream);
  });
}

void cuda_reduced_squares_async(std::span<const SliceUpdate> batch, double* sums,
                                LaunchMemorySource& memory, CudaStream stream) {
  const Plan plan(Purpose::kSquares, batch);
  const std::byte* const table = prepare_async(plan, memory, stream);
  plan.for_each_launch(
      table, [&](const Variant& variant, const Launch& launch, const BatchView& view) {
        if (variant.is_double) {
          launch_async(gpu::SquaresBody<double>{view, sums}, launch.num_slices, "squares", stream);
        } else {
          launch_async(gpu::SquaresBody<float>{view, sums}, launch.num_slices, "squares", stream);
        }
      });
}

}  // namespace psstore
