// int8 and sign: a block of 256 elements at a time, to and from floats.
//
// Included only by codec_loops.h: see loops.h for why everything is in an unnamed namespace.
#pragma once

#include <algorithm>
#include <bit>

#include "kernels/codec.h"
#include "kernels/codec_elements.h"
#include "kernels/elements.h"

namespace psstore {
namespace {

static_assert(kBlockElems % kEncodedBlock == 0 && kEncodedBlock % kShortBlockElems == 0,
              "a block of the reduction begins with a scale, or has one for all");

// ---- int8 -----------------------------------------------------------------------------------------

// Magnitudes as integers have the order of the numbers, and NaN comes last: no order of looking matters.
inline float int8_scale(const float* x) {
  int32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < kEncodedBlock; ++i) {
    const auto magnitude = static_cast<int32_t>(magnitude_bits(x[i]));
    largest = magnitude > largest ? magnitude : largest;
  }
  return scale_of_largest(std::bit_cast<float>(largest));
}

// Codes of a block, and what they say. A scale of 0, be it one that was rounded to it, says nothing.
inline void encode_int8_block(float scale, const float* x, int8_t* codes, float* decoded) {
  if (!(scale > 0)) {
    std::fill_n(codes, kEncodedBlock, int8_t{0});
    std::fill_n(decoded, kEncodedBlock, scale * 0.0F);
    return;
  }
  // Apart from each other: GCC 12 does the clamping of what becomes bytes as bytes, in masks.
  float* shifted = decoded;
  for_each_index(kEncodedBlock, [=](int64_t i) { shifted[i] = shifted_code(scale, x[i]); });
  for_each_index(kEncodedBlock, [=](int64_t i) {
    codes[i] = static_cast<int8_t>(std::bit_cast<uint32_t>(shifted[i]));
    decoded[i] = scale * (shifted[i] - kRounder);
  });
}

inline void decode_int8_block(float scale, const std::byte* codes, int64_t count, float* out) {
  for_each_index(count, [=](int64_t i) { out[i] = decoded_int8(scale, load<int8_t>(codes, i)); });
}

// ---- sign -----------------------------------------------------------------------------------------

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
  return finite_or_nan(lanes[0] / static_cast<float>(count));
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
