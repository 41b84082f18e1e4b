// What libFuzzer calls: the target that PSSTORE_FUZZ_TARGET names (CMakeLists.txt). What it throws ends the program.
#include <cstdint>

#include "fuzz_targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  psstore::testing::PSSTORE_FUZZ_TARGET(std::as_bytes(std::span(data, size)));
  return 0;
}
