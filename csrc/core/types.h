// The words of the project as types: dtypes, rule kinds, keys and the slice descriptor.
//
// Plain data only; whoever validates it says so in its own header.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/errors.h"

namespace psstore {

// How elements are encoded, in memory and on the wire. Numbers are part of the wire format.
enum class DType : uint8_t { kFloat32 = 1, kFloat64 = 2, kBFloat16 = 3, kFloat16 = 4 };

// Bytes of one element; 0 for a number that is no dtype.
constexpr size_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return 4;
    case DType::kFloat64: return 8;
    case DType::kBFloat16:
    case DType::kFloat16: return 2;
  }
  return 0;
}

// Which update rule a tensor has. kAssign and kAdd apply on arrival, the others by decision.
enum class RuleKind : uint8_t {
  kAssign = 1,
  kAdd = 2,
  kSgd = 3,
  kAdam = 4,
  kAdamW = 5,
  kAdagrad = 6,
  kRmsProp = 7,
  kReduce = 8,  // the value becomes the reduced contributions themselves
};

constexpr bool applies_by_decision(RuleKind kind) {
  return kind >= RuleKind::kSgd;
}

// The id of a slice: tensor id in the high 40 bits, index of the slice in the low 24.
using Key = uint64_t;
constexpr int kSliceIndexBits = 24;
constexpr Key make_key(uint64_t tensor_id, uint64_t slice_index) {
  return tensor_id << kSliceIndexBits | slice_index;
}
constexpr uint64_t tensor_of(Key key) {
  return key >> kSliceIndexBits;
}

// One slice in a frame's table. Its memory layout is its wire layout (little-endian hosts only).
//
//   0        8          16           20     21      22     24         32
//   | key    | version  | num_bytes  | dtype| status| part | reserved |
//
// version    pull request: "only if the slot's version is at least this", so whoever has v asks for
//            v + 1; 0: in any case. Reply: the slot's version
// num_bytes  of this slice in the payload; 0 in requests to read and in replies without bytes
// dtype      encoding of the payload; in a pull request the encoding wanted
// status     an ErrorCode; 0 in requests
// part       of the slot: 0 its value, i its state buffer i - 1 (StateLayout, rules/hyper.h); other
//            than 0 in PULL, RESTORE and their replies only. Of a state buffer, `version` is the number
//            of steps taken
struct SliceEntry {
  Key key = 0;
  uint64_t version = 0;
  uint32_t num_bytes = 0;
  DType dtype = DType::kFloat32;
  ErrorCode status = ErrorCode::OK;
  uint16_t part = 0;
  uint64_t reserved = 0;
};
static_assert(sizeof(SliceEntry) == 32);

// The highest part there is: no update rule keeps more state buffers.
inline constexpr uint16_t kMaxPart = 3;

}  // namespace psstore
