// The words of the project as types: dtypes, rule kinds, keys and the slice descriptor.
//
// Plain data only; whoever validates it says so in its own header.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/errors.h"

namespace psstore {

// How elements are encoded, in memory and on the wire. Numbers are part of the wire format. Those from kInt8
// on are encodings (kernels/codec.h): of float32 payloads, never of what is stored.
enum class DType : uint8_t {
  kFloat32 = 1,
  kFloat64 = 2,
  kBFloat16 = 3,
  kFloat16 = 4,
  kInt8 = 5,
  kSign = 6,
  kTopK = 7,
};

// In a slice's descriptor, in place of a dtype: its bytes are a contribution to rows (rows/contribution.h). No enumerator,
// since no element is of it, and no kernel meets it.
inline constexpr DType kRowsEncoding{8};

// Added to the number of what rows travel in, if that is not float32: a contribution to rows whose gradients are in it.
inline constexpr uint8_t kRowsBit = 32;

// In the descriptor of a slice that is read, added to the number of a dtype: its bytes are what has changed since the
// version that the reader has (changes/changes.h). No enumerator, either.
inline constexpr uint8_t kChangesBit = 16;
constexpr bool is_of_changes(DType dtype) {
  return (static_cast<uint8_t>(dtype) & kChangesBit) != 0;
}
constexpr DType changes_of(DType dtype) {
  return static_cast<DType>(static_cast<uint8_t>(dtype) | kChangesBit);
}
// What the changed elements are of.
constexpr DType dtype_of_changes(DType dtype) {
  return static_cast<DType>(static_cast<uint8_t>(dtype) & ~kChangesBit);
}

// Bytes of one element; 0 for an encoding, whose elements have none of their own, and for a number that
// is no dtype.
constexpr size_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return 4;
    case DType::kFloat64: return 8;
    case DType::kBFloat16:
    case DType::kFloat16: return 2;
    case DType::kInt8:
    case DType::kSign:
    case DType::kTopK: return 0;
  }
  return 0;
}

constexpr bool is_encoding(DType dtype) {
  return dtype == DType::kInt8 || dtype == DType::kSign || dtype == DType::kTopK;
}

// Whether rows can be pushed, and read, in that.
constexpr bool rows_travel_as(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16 ||
         dtype == DType::kInt8;
}
// What the gradients of such a contribution are in.
constexpr DType dtype_of_rows(DType encoding) {
  if (encoding == kRowsEncoding) return DType::kFloat32;
  return static_cast<DType>(static_cast<uint8_t>(encoding) & ~kRowsBit);
}
constexpr DType rows_in(DType dtype) {
  if (dtype == DType::kFloat32) return kRowsEncoding;
  return static_cast<DType>(static_cast<uint8_t>(dtype) | kRowsBit);
}
constexpr bool is_rows_encoding(DType encoding) {
  const DType dtype = dtype_of_rows(encoding);
  return rows_travel_as(dtype) && rows_in(dtype) == encoding;
}

constexpr bool is_dtype(DType dtype) {
  return dtype_bytes(dtype) != 0 || is_encoding(dtype);
}

// Consecutive elements that share a scale in kInt8 and kSign.
inline constexpr uint64_t kEncodedBlockElems = 256;
// Of one element that kTopK sends: its index and its value.
inline constexpr uint64_t kTopKEntryBytes = 8;

constexpr uint64_t num_encoded_blocks(uint64_t num_elems) {
  return (num_elems + kEncodedBlockElems - 1) / kEncodedBlockElems;
}

// Bytes of a payload of that many elements in any dtype; of kTopK with `num_kept` of them.
constexpr uint64_t encoded_bytes(DType dtype, uint64_t num_elems, uint64_t num_kept = 0) {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kFloat64:
    case DType::kBFloat16:
    case DType::kFloat16: return num_elems * dtype_bytes(dtype);
    case DType::kInt8: return num_encoded_blocks(num_elems) * sizeof(float) + num_elems;
    case DType::kSign: return num_encoded_blocks(num_elems) * sizeof(float) + (num_elems + 7) / 8;
    case DType::kTopK: return num_kept * kTopKEntryBytes;
  }
  return 0;
}

// Whether a payload of `num_bytes` can be that many elements.
constexpr bool is_encoded_size(DType dtype, uint64_t num_elems, uint64_t num_bytes) {
  if (dtype != DType::kTopK) return num_bytes == encoded_bytes(dtype, num_elems);
  return num_bytes % kTopKEntryBytes == 0 && num_bytes / kTopKEntryBytes <= num_elems;
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
  // Of rows (rules/sparse.h), and those up to kFtrl of nothing else.
  kSparseSgd = 9,
  kSparseAdagrad = 10,
  kRowwiseAdagrad = 11,
  kSparseAdam = 12,
  kSparseMomentum = 13,
  kFtrl = 14,
  kDelayedNesterov = 15,
};
inline constexpr RuleKind kLastRule = RuleKind::kDelayedNesterov;

constexpr bool applies_by_decision(RuleKind kind) {
  return kind >= RuleKind::kSgd;
}

// Whether its tensors are tables of rows.
constexpr bool is_of_rows(RuleKind kind) {
  return kind >= RuleKind::kSparseSgd && kind <= RuleKind::kFtrl;
}

// Whether its steps follow a gradient that can be made up for what has become of the value since (rules/compensation.h).
constexpr bool compensates(RuleKind kind) {
  return applies_by_decision(kind) && !is_of_rows(kind) && kind != RuleKind::kReduce;
}

// What becomes of the contributions to a tensor before its rule sees them: how one of them that is far from the others
// counts. The last two are of each element by itself (kernels/sorted.h).
enum class ReductionKind : uint8_t {
  kMean = 0,  // the weighted sum, divided
  kMedian = 1,
  kTrimmedMean = 2,  // of those that are left without so many of the lowest and of the highest
};
inline constexpr ReductionKind kLastReduction = ReductionKind::kTrimmedMean;

struct Reduction {
  ReductionKind kind = ReductionKind::kMean;
  uint32_t trim = 0;  // kTrimmedMean: how many are dropped at either end, if any are left then

  bool operator==(const Reduction&) const = default;

  constexpr bool sorts() const { return kind != ReductionKind::kMean; }
  // Of `num_members`, at either end: all but the middle one or two, or as many as were asked for.
  constexpr uint32_t num_dropped(uint32_t num_members) const {
    const uint32_t most = num_members == 0 ? 0 : (num_members - 1) / 2;
    return kind == ReductionKind::kTrimmedMean && trim < most ? trim : most;
  }
};

// The most members of a decision that a tensor can be sorted over: what bounds the memory that it takes on a thread's
// stack, to 64 KiB.
inline constexpr uint32_t kMaxSorted = 256;

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
//   | key    | version  | num_bytes  | dtype| status| part | offset   |
//
// version    pull request: "only if the slot's version is at least this", so whoever has v asks for
//            v + 1; 0: in any case. Reply: the slot's version
// num_bytes  of this slice in the payload; 0 in requests to read and in replies without bytes
// dtype      encoding of the payload; in a pull request the encoding wanted
// status     an ErrorCode; 0 in requests
// part       of the slot: 0 its value, i its state buffer i - 1 (StateLayout, rules/hyper.h); other
//            than 0 in PULL, RESTORE and their replies only. Of a state buffer, `version` is the number
//            of steps taken
// offset     of the slice in the memory that both sides share, if its bytes lie there (kFlagShared of
//            wire/header.h); else 0
struct SliceEntry {
  Key key = 0;
  uint64_t version = 0;
  uint32_t num_bytes = 0;
  DType dtype = DType::kFloat32;
  ErrorCode status = ErrorCode::OK;
  uint16_t part = 0;
  uint64_t offset = 0;
};
static_assert(sizeof(SliceEntry) == 32);

// The highest part there is: no update rule keeps more state buffers.
inline constexpr uint16_t kMaxPart = 3;

}  // namespace psstore
