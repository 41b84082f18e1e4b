// The memory layout of DLPack's unversioned capsules, which torch has made since 1.0
// (https://dmlc.github.io/dlpack/latest/c_api.html): what we read of them, and no more.
#pragma once

#include <cstdint>

namespace psstore::bindings {

struct DLDevice {
  int32_t type;
  int32_t id;
};
inline constexpr int32_t kDLMainMemory = 1;  // kDLCPU

struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};
inline constexpr uint8_t kDLFloat = 2;
inline constexpr uint8_t kDLBFloat = 4;

// The first member of what a capsule named "dltensor" points to; the capsule frees it.
struct DLTensor {
  std::byte* data;
  DLDevice device;
  int32_t num_dims;
  DLDataType dtype;
  const int64_t* shape;
  const int64_t* strides;  // in elements; null: row-major without gaps
  uint64_t byte_offset;
};

}  // namespace psstore::bindings
