// Batches of updates: the table to the device, then a launch for each variant.
#include <new>

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

// On the host the table follows its plan, which cuda_rewrite_batch() compares the next one with.
constexpr size_t kPlanBytes = (sizeof(Plan) + 15) / 16 * 16;

void check_memory(const Plan& plan, const LaunchMemory& memory) {
  const size_t needed = kPlanBytes + plan.num_bytes();
  if (memory.num_bytes < needed) {
    throw Error(ErrorCode::INTERNAL, "a batch's descriptors need " + std::to_string(needed) +
                                         " bytes of launch memory, not " +
                                         std::to_string(memory.num_bytes));
  }
}

// Writes the plan and the table, and puts the table's copy into the stream.
Plan prepare_async(Purpose purpose, std::span<const SliceUpdate> batch, const LaunchMemory& memory,
                   CudaStream stream) {
  const Plan plan(purpose, batch);
  check_memory(plan, memory);
  ::new (memory.pinned) Plan(plan);
  plan.write(batch, memory.pinned + kPlanBytes);
  if (plan.num_bytes() > 0) {
    gpu::check(cudaMemcpyAsync(memory.device + kPlanBytes, memory.pinned + kPlanBytes,
                               plan.num_bytes(), cudaMemcpyHostToDevice, stream),
               "copy of descriptors to the device");
  }
  return plan;
}

template <class T>
void launch_update(const Variant& variant, const BatchView& view, CudaStream stream) {
  with_form<T>(variant.step, [&](auto type) {
    gpu::launch_update_async<typename decltype(type)::type>(variant.sources, view, stream);
  });
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

size_t cuda_descriptor_bytes(std::span<const SliceUpdate> batch) {
  return kPlanBytes + Plan::most_bytes(batch);
}

void cuda_reduce_update_async(std::span<const SliceUpdate> batch, const LaunchMemory& memory,
                              CudaStream stream) {
  const Plan plan = prepare_async(Purpose::kUpdate, batch, memory, stream);
  plan.for_each_launch(memory.device + kPlanBytes,
                       [&](const Variant& variant, const Launch&, const BatchView& view) {
                         variant.is_double ? launch_update<double>(variant, view, stream)
                                           : launch_update<float>(variant, view, stream);
                       });
}

void cuda_rewrite_batch(std::span<const SliceUpdate> batch, const LaunchMemory& memory) {
  const Plan plan(Purpose::kUpdate, batch);
  const Plan& captured = *std::launder(reinterpret_cast<const Plan*>(memory.pinned));
  if (!plan.fits(captured)) {
    throw Error(ErrorCode::INTERNAL,
                "the batch needs other launches than the captured ones; capture it anew");
  }
  plan.write(batch, memory.pinned + kPlanBytes);
}

void cuda_reduced_squares_async(std::span<const SliceUpdate> batch, double* sums,
                                const LaunchMemory& memory, CudaStream stream) {
  const Plan plan = prepare_async(Purpose::kSquares, batch, memory, stream);
  plan.for_each_launch(memory.device + kPlanBytes, [&](const Variant& variant, const Launch& launch,
                                                       const BatchView& view) {
    if (variant.is_double) {
      launch_async(gpu::SquaresBody<double>{view, sums}, launch.num_slices, "squares", stream);
    } else {
      launch_async(gpu::SquaresBody<float>{view, sums}, launch.num_slices, "squares", stream);
    }
  });
}

}  // namespace psstore
