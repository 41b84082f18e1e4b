// int8 and sign: a block of 256 elements at a time, to and from floats.
//
// Included only by codec_loops.h: see loops.h for why everything is in an unnamed namespace.
#pragma once

#include <algorithm>
#include <bit>
#include <limits>

#include "kernels/codec.h"
#include "kernels/elements.h"

namespace psstore {
namespace {

constexpr int64_t kEncodedBlock = kEncodedBlockElems;
static_assert(kBlockElems % kEncodedBlock == 0, "a block of the reduction begins with a scale");

constexpr uint32_t kSignBit = 0x80000000U;
constexpr uint32_t kInfinityBits = 0x7F800000U;

[[gnu::always_inline]] inline uint32_t magnitude_bits(float x) {
  return std::bit_cast<uint32_t>(x) & ~kSignBit;
}

[[gnu::always_inline]] inline bool is_finite(float x) {
  return magnitude_bits(x) < kInfinityBits;
}

// The first half of a payload: a scale for each block. The codes of the elements follow.
constexpr int64_t codes_offset(int64_t num_elems) {
  return static_cast<int64_t>(num_encoded_blocks(static_cast<uint64_t>(num_elems)) * sizeof(float));
}

// ---- int8 -----------------------------------------------------------------------------------------

constexpr float kLargestCode = 127.0F;
// Added to a number below 2^22 it leaves the number, rounded to nearest even, in the low bits.
constexpr float kRounder = 0x1.8p23F;

// Magnitudes as integers have the order of the numbers, and NaN comes last: no order of looking matters.
inline float int8_scale(const float* x) {
  int32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < kEncodedBlock; ++i) {
    const auto magnitude = static_cast<int32_t>(magnitude_bits(x[i]));
    largest = magnitude > largest ? magnitude : largest;
  }
  const float maximum = std::bit_cast<float>(largest);
  return is_finite(maximum) ? maximum / kLargestCode : std::numeric_limits<float>::quiet_NaN();
}

// Codes of a block, and what they say. A scale of 0, be it one that was rounded to it, says nothing.
inline void encode_int8_block(float scale, const float* x, int8_t* codes, float* decoded) {
  if (!(scale > 0)) {
    std::fill_n(codes, kEncodedBlock, int8_t{0});
    std::fill_n(decoded, kEncodedBlock, scale * 0.0F);
    return;
  }
  for_each_index(kEncodedBlock, [=](int64_t i) {
    // A scale near the smallest numbers is rounded so much that a quotient may be beyond the codes.
    const float quotient = x[i] / scale;
    const float below = quotient < kLargestCode ? quotient : kLargestCode;
    const float clamped = below > -kLargestCode ? below : -kLargestCode;
    const float shifted = clamped + kRounder;
    codes[i] = static_cast<int8_t>(std::bit_cast<uint32_t>(shifted));
    decoded[i] = scale * (shifted - kRounder);
  });
}

inline void decode_int8_block(float scale, const std::byte* codes, int64_t count, float* out) {
  for_each_index(count,
                 [=](int64_t i) { out[i] = scale * static_cast<float>(load<int8_t>(codes, i)); });
}

// ---- sign -----------------------------------------------------------------------------------------

// Element i is added to partial sum i modulo kMeanLanes, so that the order of the additions is the same
// at any vector width; then the upper half is added to the lower half until one is left.
constexpr int64_t kMeanLanes = 32;

// `x` is filled up with zeros to a whole block; `count` elements of it are real.
inline float sign_scale(const float* x, int64_t count) {
  float lanes[kMeanLanes] = {};
  for (int64_t begin = 0; begin < kEncodedBlock; begin += kMeanLanes) {
    for_each_index(kMeanLanes, [&](int64_t lane) {
      lanes[lane] = lanes[lane] + std::bit_cast<float>(magnitude_bits(x[begin + lane]));
    });
  }
  for (int64_t width = kMeanLanes / 2; width > 0; width /= 2) {
    for (int64_t lane = 0; lane < width; ++lane) lanes[lane] = lanes[lane] + lanes[lane + width];
  }
  const float mean = lanes[0] / static_cast<float>(count);
  return is_finite(mean) ? mean : std::numeric_limits<float>::quiet_NaN();
}

// Eight bytes of 0 or 1 to the bits of one byte: bit 8 i of the factor's product with byte j lands in bit
// 56 + j where i + j = 7, and nothing carries.
inline uint8_t bits_of_bytes(const uint8_t* bytes) {
  uint64_t eight;
  std::memcpy(&eight, bytes, sizeof eight);
  return static_cast<uint8_t>(eight * 0x0102040810204080U >> 56);
}

// Bits of a block, and what they say.
inline void encode_sign_block(float scale, const float* x, uint8_t* bits, float* decoded) {
  uint8_t negative[kEncodedBlock];
  for_each_index(kEncodedBlock, [&](int64_t i) {
    const uint32_t sign = std::bit_cast<uint32_t>(x[i]) & kSignBit;
    negative[i] = static_cast<uint8_t>(sign >> 31);
    decoded[i] = std::bit_cast<float>(std::bit_cast<uint32_t>(scale) | sign);
  });
  for (int64_t i = 0; i < kEncodedBlock / 8; ++i) bits[i] = bits_of_bytes(negative + 8 * i);
}

// Fills `out` up to the last bit of the last byte. The bits of a byte from a table: not every instruction set
// shifts each element by another number of bits.
inline void decode_sign_block(float scale, const std::byte* bits, int64_t count, float* out) {
  static constexpr uint32_t kBits[] = {1, 2, 4, 8, 16, 32, 64, 128};
  const auto positive = std::bit_cast<uint32_t>(scale);
  for (int64_t begin = 0; begin < count; begin += 8) {
    const auto byte = static_cast<uint32_t>(load<uint8_t>(bits, begin / 8));
    for_each_index(8, [=](int64_t bit) {
      const uint32_t sign = (byte & kBits[bit]) != 0 ? kSignBit : 0;
      out[begin + bit] = std::bit_cast<float>(positive ^ sign);
    });
  }
}

}  // namespace
}  // namespace psstore
