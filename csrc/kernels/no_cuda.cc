// A build without CUDA: what batch_cuda.h promises for one.
#include "kernels/batch_cuda.h"

namespace psstore {
namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorCode::INTERNAL,
              "this build has no CUDA kernels; build with nvcc and PSSTORE_CUDA=on");
}

}  // namespace

const int kCudaVersion = 0;

int cuda_device_count() {
  return 0;
}

void cuda_reduce_update_async(std::span<const SliceUpdate>, LaunchMemorySource&, CudaStream) {
  refuse();
}

void cuda_reduced_squares_async(std::span<const SliceUpdate>, double*, LaunchMemorySource&,
                                CudaStream) {
  refuse();
}

void cuda_copy_pieces_async(std::span<const CopyPiece>, LaunchMemorySource&, CudaStream) {
  refuse();
}

void cuda_convert_async(DType, DType, const void*, void*, int64_t, CudaStream) {
  refuse();
}

void cuda_all_finite_async(DType, const void*, int64_t, uint32_t*, CudaStream) {
  refuse();
}

void cuda_all_finite_async(const Encoded&, uint32_t*, CudaStream) {
  refuse();
}

size_t cuda_encode_scratch_bytes(std::span<const ToEncode>) {
  refuse();
}

void cuda_encode_async(std::span<const ToEncode>, std::byte*, LaunchMemorySource&, CudaStream) {
  refuse();
}

void cuda_encode_changes_async(std::span<const ToEncode>, LaunchMemorySource&, CudaStream) {
  refuse();
}

void cuda_decode_async(const Encoded&, void*, CudaStream) {
  refuse();
}

}  // namespace psstore
