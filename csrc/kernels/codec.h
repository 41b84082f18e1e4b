// Encodings: float32 gradients and deltas in fewer bytes, with loss, and what the loss was.
//
// A payload of n elements, in nb = ceil(n / 256) blocks of which the last may be shorter; little-endian, of
// any alignment:
//
//   kInt8   | scale: nb x f32  | q: n x i8                          |  element i is scale[i / 256] * q[i]
//   kSign   | scale: nb x f32  | bit i % 8 of byte i / 8: negative  |  element i is +-scale[i / 256]
//   kTopK   | index: k x u32   | value: k x f32                     |  those at the indices; else +0
//
// int8 (Dettmers 2016, arXiv:1511.04561): scale = max|x| / 127, q = x / scale, each rounded to nearest even.
// sign (Karimireddy 2019, arXiv:1901.09847): scale = mean|x|. topk (Stich 2018, arXiv:1809.07599): the k of
// largest magnitude, of equal ones the first; indices ascend. What a payload lost is carried in a residual
// and added to what is encoded next (error feedback: the last two). Half precision, whose elements stay
// elements, is encoded likewise.
//
// Contract: as kernels/update.h. All instruction sets give the same bytes.
#pragma once

#include <cstdint>

#include "core/types.h"

namespace psstore {

// What is to be encoded: x = source, or source + residual, or source - base.
struct ToEncode {
  DType encoding = DType::kInt8;  // or half precision
  const void* source = nullptr;   // (num_elems,) float32
  // (num_elems,) float32, or null. Becomes x minus what the payload says; where the payload can't say a
  // finite number (a NaN or an infinity in the element, or in its block) it stays.
  void* residual = nullptr;
  // (num_elems,) float32, or null; null beside a residual, for kTopK and for half precision. Becomes base plus
  // what the payload says, whatever that is: what somebody has who had the base and adds the payload to it.
  void* base = nullptr;
  int64_t num_elems = 0;
  int64_t num_kept = 0;     // k of kTopK, at most num_elems; else not read
  void* payload = nullptr;  // encoded_bytes() of it
};

constexpr bool can_encode(DType encoding) {
  return is_encoding(encoding) || encoding == DType::kBFloat16 || encoding == DType::kFloat16;
}

// A block of kInt8 or kSign with a NaN or an infinity in it, or which says an infinity, gets NaN as its scale, so that the
// whole block is NaN again when decoded. REQUIRES: can_encode(). The ranges must not overlap.
void encode(const ToEncode& what);

// encode() of a change, source - base, to be told to everybody who has the base. Where the payload can't say it, as it
// is not finite, the base becomes the source. Returns whether it can: all_finite() of it. REQUIRES: there is a base.
bool encode_change(const ToEncode& what);

// A payload of an encoding.
struct Encoded {
  DType encoding = DType::kInt8;
  const void* payload = nullptr;
  uint64_t num_bytes = 0;
  uint64_t num_elems = 0;
};

// Whether the payload means something: its size fits, and of kTopK its indices ascend and are in range.
// What comes from outside is asked this before anything else is done with it.
bool is_well_formed(const Encoded& encoded);

// The rest REQUIRES: is_well_formed().

// All elements, as float32, to `destination`.
void decode(const Encoded& encoded, void* destination);

// Whether no element is NaN or an infinity.
bool all_finite(const Encoded& encoded);

}  // namespace psstore
