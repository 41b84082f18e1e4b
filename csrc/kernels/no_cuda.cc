// A build without CUDA: what update_cuda.h promises for one.
#include "kernels/update_cuda.h"

namespace psstore {

const bool kCudaCompiled = false;

int cuda_device_count() {
  return 0;
}

void cuda_reduce_sgd(const CudaSgdUpdate&) {
  throw Error(ErrorCode::INTERNAL,
              "this build has no CUDA kernels; build with nvcc and PSSTORE_CUDA=on");
}

}  // namespace psstore
