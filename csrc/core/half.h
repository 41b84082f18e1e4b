// Half precision as bits: exact widening to float, and rounding, to nearest even as torch's Tensor.to or by lot.
//
// Integer arithmetic without branches, so that a compiler turns a loop over these into vector code on
// any instruction set. A NaN stays a NaN; its payload is not kept.
//
//   bfloat16  s eeeeeeee mmmmmmm        the upper half of a float
//   float16   s eeeee mmmmmmmmmm        exponent bias 15, where float has 127
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace psstore {

// Distinct types, so that a loop over elements is chosen by the type that it loads.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

namespace half_detail {
inline constexpr uint32_t kSign = 0x80000000U;
inline constexpr uint32_t kInfinity = 0x7F800000U;
inline constexpr int kDroppedBits = 13;                  // of the mantissa: 23 - 10
inline constexpr uint32_t kRebias = 112U << 23;          // 127 - 15, in place in a float
inline constexpr uint32_t kSmallestNormal = 113U << 23;  // 2^-14, float16's smallest normal number
inline constexpr uint32_t kOverflow = 0x477FF000U;  // 65520: halfway to 2^16, rounds to infinity
}  // namespace half_detail

PSSTORE_HD float to_float(BFloat16 half) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(half.bits) << 16);
}

PSSTORE_HD float to_float(Float16 half) {
  using namespace half_detail;
  const uint32_t sign = (half.bits & 0x8000U) << 16;
  const uint32_t magnitude = half.bits & 0x7FFFU;
  const uint32_t shifted = magnitude << kDroppedBits;
  // A subnormal is an integer times 2^-24; the conversion of a small integer is exact.
  const float subnormal = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24F;
  const uint32_t finite =
      magnitude < 0x0400U ? __builtin_bit_cast(uint32_t, subnormal) : shifted + kRebias;
  return __builtin_bit_cast(float, sign | (magnitude >= 0x7C00U ? shifted | kInfinity : finite));
}

PSSTORE_HD BFloat16 to_bfloat16(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t rounded = bits + 0x7FFFU + (bits >> 16 & 1U);
  const bool is_nan = (bits & ~half_detail::kSign) > half_detail::kInfinity;
  return {static_cast<uint16_t>(is_nan ? 0x7FC0U : rounded >> 16)};
}

// Up or down, in proportion to how near each is: `lot` is one of 2^16 equally likely numbers below that. What bfloat16 can
// say stays as it is.
PSSTORE_HD BFloat16 to_bfloat16(float value, uint32_t lot) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const bool is_nan = (bits & ~half_detail::kSign) > half_detail::kInfinity;
  return {static_cast<uint16_t>(is_nan ? 0x7FC0U : (bits + lot) >> 16)};
}

PSSTORE_HD Float16 to_float16(float value) {
  using namespace half_detail;
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t sign = (bits & kSign) >> 16;
  const uint32_t magnitude = bits & ~kSign;
  const uint32_t rounded = magnitude + 0x0FFFU + (magnitude >> kDroppedBits & 1U) - kRebias;
  // 0.5's last bit is 2^-24, float16's smallest step: the addition does the rounding.
  const float aligned = __builtin_bit_cast(float, magnitude) + 0.5F;
  const uint32_t subnormal =
      __builtin_bit_cast(uint32_t, aligned) - __builtin_bit_cast(uint32_t, 0.5F);
  const uint32_t finite = magnitude < kSmallestNormal ? subnormal : rounded >> kDroppedBits;
  const uint32_t special = magnitude > kInfinity ? 0x7E00U : 0x7C00U;
  return {static_cast<uint16_t>(sign | (magnitude >= kOverflow ? special : finite))};
}

}  // namespace psstore
