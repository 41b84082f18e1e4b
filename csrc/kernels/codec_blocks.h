// int8 and sign: encoding a block of 256 elements, element by element: the reference, which a compiler's vectoriser
// makes of what it can.
//
// Included only by codec_encode.h and by what an instruction set has of its own: see loops.h for why everything is in
// an unnamed namespace.
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/codec_elements.h"
#include "kernels/codec_feedback.h"
#include "kernels/elements.h"

namespace psstore {
namespace {

// Where the two halves of a payload begin.
struct BlockPayload {
  std::byte* scales;
  std::byte* codes;
};

// A block on its way: what is to be encoded, filled up with zeros, and what its payload says.
struct BlockBuffers {
  alignas(64) float x[kEncodedBlock];
  alignas(64) float said[kEncodedBlock];
  alignas(64) std::byte codes[kEncodedBlock];
};

// ---- int8 -----------------------------------------------------------------------------------------

struct Int8Code {
  static constexpr int kBits = 8;

  // Magnitudes as integers have the order of the numbers, and NaN comes last: no order of looking matters.
  static float scale_of(const float* x, int64_t) {
    int32_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < kEncodedBlock; ++i) {
      const auto magnitude = static_cast<int32_t>(magnitude_bits(x[i]));
      largest = magnitude > largest ? magnitude : largest;
    }
    return scale_of_largest(std::bit_cast<float>(largest));
  }

  // A scale of 0, be it one that was rounded to it, says nothing.
  static void encode(float scale, BlockBuffers& block) {
    if (!(scale > 0)) {
      std::fill_n(block.codes, kEncodedBlock, std::byte{0});
      std::fill_n(block.said, kEncodedBlock, scale * 0.0F);
      return;
    }
    // Apart from each other: GCC 12 does the clamping of what becomes bytes as bytes, in masks.
    float* said = block.said;
    for_each_index(kEncodedBlock,
                   [said, x = block.x, scale](int64_t i) { said[i] = shifted_code(scale, x[i]); });
    for_each_index(kEncodedBlock, [said, codes = block.codes, scale](int64_t i) {
      codes[i] = static_cast<std::byte>(bits_of(said[i]));
      said[i] = scale * (said[i] - kRounder);
    });
  }
};

// ---- sign -----------------------------------------------------------------------------------------

struct SignCode {
  static constexpr int kBits = 1;

  static float scale_of(const float* x, int64_t count) {
    float lanes[kMeanLanes] = {};
    for (int64_t begin = 0; begin < kEncodedBlock; begin += kMeanLanes) {
      for_each_index(kMeanLanes, [&](int64_t lane) {
        lanes[lane] = lanes[lane] + float_of(magnitude_bits(x[begin + lane]));
      });
    }
    for (int64_t width = kMeanLanes / 2; width > 0; width /= 2) {
      for (int64_t lane = 0; lane < width; ++lane) lanes[lane] = lanes[lane] + lanes[lane + width];
    }
    return finite_or_nan(lanes[0] / static_cast<float>(count));
  }

  static void encode(float scale, BlockBuffers& block) {
    uint8_t negative[kEncodedBlock];
    for_each_index(kEncodedBlock, [&, x = block.x, said = block.said](int64_t i) {
      const uint32_t sign = bits_of(x[i]) & kSignBit;
      negative[i] = static_cast<uint8_t>(sign >> 31);
      said[i] = float_of(bits_of(scale) | sign);
    });
    for (int64_t i = 0; i < kEncodedBlock / 8; ++i) {
      block.codes[i] = static_cast<std::byte>(bits_of_bytes(negative + 8 * i));
    }
  }
};

// ---- either ---------------------------------------------------------------------------------------

// The `count` elements from `begin` on, which begins a block.
template <class Code, class Feedback>
void encode_block(const BlockPayload& payload, const Feedback& feedback, int64_t begin,
                  int64_t count) {
  BlockBuffers block;
  for_each_index(count, [&](int64_t i) { block.x[i] = feedback.template meant<float>(begin + i); });
  std::fill(block.x + count, block.x + kEncodedBlock, 0.0F);
  const float scale = Code::scale_of(block.x, count);
  Code::encode(scale, block);
  store(payload.scales, begin / kEncodedBlock, scale);
  std::memcpy(payload.codes + begin * Code::kBits / 8, block.codes,
              static_cast<size_t>((count * Code::kBits + 7) / 8));
  if (!is_finite(scale) && !Feedback::kTakesNonFinite) return;
  for_each_index(count, [&](int64_t i) { feedback.keep(begin + i, block.x[i], block.said[i]); });
}

}  // namespace
}  // namespace psstore
