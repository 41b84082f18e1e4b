// A build without CUDA: what device.h promises for one.
#include "device/device.h"

namespace psstore::device {

std::shared_ptr<Device> open_cuda_device(const std::string& name, int) {
  throw Error(ErrorCode::BAD_ARGUMENT,
              "device '" + name + "': this build has no CUDA; build with nvcc and PSSTORE_CUDA=on");
}

int cuda_device_of(const void*) {
  throw Error(ErrorCode::BAD_ARGUMENT,
              "an array of a CUDA device, and this build of psstore has no CUDA");
}

}  // namespace psstore::device
