// The arithmetic of one element of an encoding, for host and device.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/half.h"
#include "core/host_device.h"
#include "core/types.h"

namespace psstore {

inline constexpr int64_t kEncodedBlock = kEncodedBlockElems;
inline constexpr uint32_t kSignBit = 0x80000000U;
inline constexpr uint32_t kInfinityBits = 0x7F800000U;
inline constexpr uint32_t kNanBits = 0x7FC00000U;

PSSTORE_HD uint32_t bits_of(float x) {
  return __builtin_bit_cast(uint32_t, x);
}
PSSTORE_HD float float_of(uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}

PSSTORE_HD uint32_t magnitude_bits(float x) {
  return bits_of(x) & ~kSignBit;
}

PSSTORE_HD bool is_finite(float x) {
  return magnitude_bits(x) < kInfinityBits;
}

// The scale itself, or NaN in the place of one that is not finite.
PSSTORE_HD float finite_or_nan(float scale) {
  return is_finite(scale) ? scale : float_of(kNanBits);
}

// The first half of a payload: a scale for each block. The codes of the elements follow.
PSSTORE_HD constexpr int64_t codes_offset(int64_t num_elems) {
  return (num_elems + kEncodedBlock - 1) / kEncodedBlock * static_cast<int64_t>(sizeof(float));
}

// What a scale is multiplied by at most: 128 and not 127, because a code of -128 is never made, but may be sent.
PSSTORE_HD constexpr float largest_code(DType encoding) {
  return encoding == DType::kInt8 ? 128.0F : 1.0F;
}

// ---- half precision -------------------------------------------------------------------------------

template <class Half>
PSSTORE_HD Half rounded_to(float x) {
  if constexpr (std::is_same_v<Half, BFloat16>) {
    return to_bfloat16(x);
  } else {
    return to_float16(x);
  }
}

// What is still to be said of x when `said` was; where that is not finite, what was before.
PSSTORE_HD float lacking(float x, float said, float before) {
  return is_finite(said) ? x - said : before;
}

// ---- int8 -----------------------------------------------------------------------------------------

inline constexpr float kLargestCode = 127.0F;
// Added to a number below 2^22 it leaves the number, rounded to nearest even, in the low bits.
inline constexpr float kRounder = 0x1.8p23F;

// NaN also for what is finite, but is not once it was rounded to a scale and is said by it.
PSSTORE_HD float scale_of_largest(float magnitude) {
  const float scale = magnitude / kLargestCode;
  return is_finite(scale * kLargestCode) ? scale : float_of(kNanBits);
}

// kRounder plus the code. A scale near the smallest numbers is rounded so much that a quotient may be beyond
// the codes. REQUIRES: scale > 0.
PSSTORE_HD float shifted_code(float scale, float x) {
  const float quotient = x / scale;
  const float below = quotient < kLargestCode ? quotient : kLargestCode;
  const float clamped = below > -kLargestCode ? below : -kLargestCode;
  return clamped + kRounder;
}

PSSTORE_HD float decoded_int8(float scale, int8_t code) {
  return scale * static_cast<float>(code);
}

// ---- sign -----------------------------------------------------------------------------------------

// Element i is added to partial sum i modulo kMeanLanes, so that the order of the additions is the same
// at any vector width; then the upper half is added to the lower half until one is left.
inline constexpr int64_t kMeanLanes = 32;

PSSTORE_HD float decoded_sign(float scale, bool is_negative) {
  return float_of(bits_of(scale) ^ (is_negative ? kSignBit : 0));
}

// Eight bytes of 0 or 1 to the bits of one byte: bit 8 i of the factor's product with byte j lands in bit
// 56 + j where i + j = 7, and nothing carries.
PSSTORE_HD uint8_t bits_of_bytes(const uint8_t* bytes) {
  uint64_t eight;
  __builtin_memcpy(&eight, bytes, sizeof eight);
  return static_cast<uint8_t>(eight * 0x0102040810204080U >> 56);
}

// ---- topk -----------------------------------------------------------------------------------------

// Elements above `magnitude` are kept, and the first `num_equal` of those that have it.
struct Cut {
  uint32_t magnitude = 0;
  int64_t num_equal = 0;
};
inline constexpr Cut kKeepNothing{~0U, 0};  // above all that there is

// The digits that the k-th largest magnitude is found by, from the highest on: 31 bits, no sign.
inline constexpr int kDigitBits[] = {11, 10, 10};

// Position of the first entry whose index is not below `index`; `index_at(entry)` ascends.
template <class IndexAt>
PSSTORE_HD int64_t first_entry(IndexAt index_at, int64_t num_kept, int64_t index) {
  int64_t begin = 0;
  for (int64_t end = num_kept; begin < end;) {
    const int64_t middle = begin + (end - begin) / 2;
    if (index_at(middle) < index) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

}  // namespace psstore
