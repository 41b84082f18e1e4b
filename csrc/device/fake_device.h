// A device of host memory, for tests: it does its work when that hurts most.
//
// What is queued waits until somebody asks for a fence; then what the fence needs is done, at times after
// other work that may run just as well, and at times only when it is asked for again. What is next to run
// is drawn with a seed. A wait that is missing lets work read what is not there yet, or what is not there
// any more: memory is poisoned (every float a NaN) when it is allocated and when it is freed, and no
// access from the host gets at it (SIGSEGV), since it is mapped only while queued work runs. It is a file
// in memory, so that other processes can import it; a fence of one is nothing to the other, as with GPUs. A copy that
// goes over the end of an allocation is refused, as CUDA refuses it, and a batch takes some memory of the device, as
// the table of a GPU's launch does.
//
// Named "fake:N", or with options "fake:N?seed=1&bytes=1048576&fail_after=10":
//   seed        of the order (0)
//   bytes       of its memory (256 MiB)
//   fail_after  pieces of work that it does before it fails for good (none: it never does)
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "device/device.h"

namespace psstore::device {

// What a name may say.
struct FakeOptions {
  uint64_t seed = 0;
  size_t num_bytes = 256u << 20;
  uint64_t fail_after = UINT64_MAX;
};

std::shared_ptr<Device> make_fake_device(const std::string& name, const FakeOptions& options);

}  // namespace psstore::device
