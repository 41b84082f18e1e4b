// Conversions, checks for finite values and decoding, one slice a call; encoding, many.
#include <algorithm>
#include <optional>

#include "kernels/gpu/change_body.h"
#include "kernels/gpu/convert_body.h"
#include "kernels/gpu/encode_plan.h"
#include "kernels/gpu/kernels.cuh"
#include "kernels/gpu/topk_body.h"

namespace psstore {
namespace {

using gpu::Grid;
using gpu::VectorMap;

// Of elements that are written to, or else read from, `data`.
VectorMap vectors_at(const void* data, size_t elem_bytes, int vector_elems, int64_t num_elems) {
  const auto place = reinterpret_cast<uintptr_t>(data) / elem_bytes;
  const auto lead = static_cast<int>(place % static_cast<size_t>(vector_elems));
  return {num_elems, vector_elems, lead};
}

// ---- convert --------------------------------------------------------------------------------------

template <class From, class To>
void convert_async(const void* source, void* destination, int64_t num_elems, CudaStream stream) {
  if constexpr (!std::is_same_v<From, To>) {  // that is a copy
    const VectorMap vectors = vectors_at(destination, sizeof(To), gpu::kConvertElems, num_elems);
    const Grid grid = Grid::of(vectors.num_chunks());
    launch_async(gpu::WriteBody<gpu::Converted<From, To>>{vectors, grid, {source}, destination},
                 grid.num_blocks(), "convert", stream);
  }
}

template <class From>
void convert_from_async(DType to, const void* source, void* destination, int64_t num_elems,
                        CudaStream stream) {
  switch (to) {
    case DType::kFloat32: return convert_async<From, float>(source, destination, num_elems, stream);
    case DType::kFloat64:
      return convert_async<From, double>(source, destination, num_elems, stream);
    case DType::kBFloat16:
      return convert_async<From, BFloat16>(source, destination, num_elems, stream);
    case DType::kFloat16:
      return convert_async<From, Float16>(source, destination, num_elems, stream);
    case DType::kInt8:
    case DType::kSign:
    case DType::kTopK: return;  // encode() and decode() do these
  }
}

// ---- finite ---------------------------------------------------------------------------------------

template <class Test>
void test_async(const Test& test, const void* data, int64_t num_elems, uint32_t* flag,
                CudaStream stream) {
  using Body = gpu::FiniteBody<Test>;
  using Element = typename Test::Element;
  const VectorMap vectors = vectors_at(data, sizeof(Element), Body::kElems, num_elems);
  const Grid grid = Grid::of(vectors.num_chunks());
  launch_async(Body{vectors, grid, data, test, flag}, grid.num_blocks(), "all_finite", stream);
}

// ---- topk -----------------------------------------------------------------------------------------

void encode_topk_async(const ToEncode& what, std::byte* memory, CudaStream stream) {
  auto* scratch = reinterpret_cast<gpu::TopkScratch*>(memory);
  const int64_t num_tiles = gpu::num_topk_tiles(what);
  const char* name = "encode topk";
  launch_async(gpu::TopkBeginBody{what, scratch}, 1, name, stream);
  for (int digit = 0; digit < 3 && what.num_kept > 0; ++digit) {
    launch_async(gpu::TopkCountBody{what, scratch, digit}, num_tiles, name, stream);
    launch_async(gpu::TopkPickBody{scratch, digit}, 1, name, stream);
  }
  launch_async(gpu::TopkTileBody{what, scratch}, num_tiles, name, stream);
  launch_async(gpu::TopkScanBody{num_tiles, scratch}, 1, name, stream);
  launch_async(gpu::TopkWriteBody{what, scratch}, num_tiles, name, stream);
}

// ---- many slices ----------------------------------------------------------------------------------

// Returns what the launch reads; nothing if there is none.
std::optional<gpu::EncodeView> encode_planned_async(const gpu::EncodePlan& plan,
                                                    LaunchMemorySource& source, CudaStream stream) {
  if (plan.num_blocks() == 0) return std::nullopt;
  const LaunchMemory memory = source.take(plan.num_bytes());
  plan.write(memory.pinned);
  gpu::copy_table_async(memory.device, memory.pinned, plan.num_bytes(), stream);
  const gpu::EncodeView view = plan.view(memory.device);
  launch_async(gpu::EncodeBody{view}, static_cast<int64_t>(plan.num_blocks()), "encode", stream);
  return view;
}

}  // namespace

void cuda_convert_async(DType from, DType to, const void* source, void* destination,
                        int64_t num_elems, CudaStream stream) {
  if (from == to) {
    const size_t num_bytes = dtype_bytes(from) * static_cast<size_t>(num_elems);
    if (num_bytes == 0) return;
    gpu::check(cudaMemcpyAsync(destination, source, num_bytes, cudaMemcpyDeviceToDevice, stream),
               "copy on the device");
    return;
  }
  switch (from) {
    case DType::kFloat32:
      return convert_from_async<float>(to, source, destination, num_elems, stream);
    case DType::kFloat64:
      return convert_from_async<double>(to, source, destination, num_elems, stream);
    case DType::kBFloat16:
      return convert_from_async<BFloat16>(to, source, destination, num_elems, stream);
    case DType::kFloat16:
      return convert_from_async<Float16>(to, source, destination, num_elems, stream);
    case DType::kInt8:
    case DType::kSign:
    case DType::kTopK: return;  // encode() and decode() do these
  }
}

void cuda_all_finite_async(DType dtype, const void* data, int64_t num_elems, uint32_t* flag,
                           CudaStream stream) {
  switch (dtype) {
    case DType::kFloat32: return test_async(gpu::Float32Test{}, data, num_elems, flag, stream);
    case DType::kFloat64: return test_async(gpu::Float64Test{}, data, num_elems, flag, stream);
    case DType::kBFloat16: return test_async(gpu::BFloat16Test{}, data, num_elems, flag, stream);
    case DType::kFloat16: return test_async(gpu::Float16Test{}, data, num_elems, flag, stream);
    case DType::kInt8:
    case DType::kSign:
    case DType::kTopK: return;  // the other one looks at their floats
  }
}

void cuda_all_finite_async(const Encoded& encoded, uint32_t* flag, CudaStream stream) {
  if (encoded.encoding == DType::kTopK) {
    const auto num_kept = static_cast<int64_t>(encoded.num_bytes / kTopKEntryBytes);
    const auto* values = static_cast<const std::byte*>(encoded.payload) + 4 * num_kept;
    return cuda_all_finite_async(DType::kFloat32, values, num_kept, flag, stream);
  }
  const auto num_scales = static_cast<int64_t>(num_encoded_blocks(encoded.num_elems));
  const gpu::ScaleTest test{largest_code(encoded.encoding)};
  test_async(test, encoded.payload, num_scales, flag, stream);
}

size_t cuda_encode_scratch_bytes(std::span<const ToEncode> batch) {
  size_t most = 0;  // one after the other
  for (const ToEncode& what : batch) {
    if (what.encoding == DType::kTopK) most = std::max(most, gpu::topk_scratch_bytes(what));
  }
  return most;
}

void cuda_encode_async(std::span<const ToEncode> batch, std::byte* scratch,
                       LaunchMemorySource& source, CudaStream stream) {
  encode_planned_async(gpu::EncodePlan(batch), source, stream);
  for (const ToEncode& what : batch) {
    if (what.encoding == DType::kTopK) encode_topk_async(what, scratch, stream);
  }
}

void cuda_encode_changes_async(std::span<const ToEncode> batch, LaunchMemorySource& source,
                               CudaStream stream) {
  const auto view = encode_planned_async(gpu::EncodePlan(batch), source, stream);
  if (!view) return;
  launch_async(gpu::ChangeBody{view->slices}, static_cast<int64_t>(batch.size()), "encode changes",
               stream);
}

void cuda_decode_async(const Encoded& encoded, void* destination, CudaStream stream) {
  const auto num_elems = static_cast<int64_t>(encoded.num_elems);
  const VectorMap vectors = vectors_at(destination, sizeof(float), gpu::kConvertElems, num_elems);
  const Grid grid = Grid::of(vectors.num_chunks());
  const gpu::Source source{encoded.payload, encoded.num_bytes, 1.0F, encoded.encoding};
  launch_async(gpu::WriteBody<gpu::Decoded>{vectors, grid, {source}, destination},
               grid.num_blocks(), "decode", stream);
}

}  // namespace psstore
