// int8 and sign: a block of 256 elements, register by register. What is to be encoded stays in registers between the
// two passes over a block, as far as there are so many, and the next blocks are fetched meanwhile: in turns with the
// element-wise encoders, 1.4 to 1.6 times as fast from memory, most of it by the fetching (docs/performance.md).
//
// `Registers` says what the operations are. Included only by the .cc file of an instruction set: see loops.h for the
// unnamed namespace.
#pragma once

#include <limits>
#include <type_traits>

#include "kernels/codec_encode.h"
#include "kernels/x86/vector_conversions.h"

namespace psstore {
namespace {

template <class Registers>
struct VectorEncoders {
  using Conversions = VectorConversions<Registers>;
  using Vector = typename Registers::Vector;
  static constexpr int64_t kElems = Registers::kElems;
  static constexpr int64_t kRegisters = kEncodedBlock / kElems;
  static constexpr int64_t kLineElems = kCacheLineBytes / int64_t{sizeof(float)};

  template <class Code, class Feedback>
  static void encode_whole(const BlockPayload& payload, const Feedback& feedback, int64_t begin) {
    if constexpr (Code::kBits == 8) {
      encode_int8(payload, feedback, begin);
    } else {
      encode_sign(payload, feedback, begin);
    }
  }

  // As ElementEncoders::encode_halves().
  template <class Half>
  static void encode_halves(const ResidualFeedback& feedback, std::byte* payload, int64_t begin,
                            int64_t count) {
    int64_t done = 0;
    if constexpr (std::is_same_v<Half, Float16>) {
      for (; done + kElems <= count; done += kElems) {
        encode_float16(feedback, payload, begin + done);
      }
    }
    ElementEncoders::encode_halves<Half>(feedback, payload, begin + done, count - done);
  }

  // As ElementEncoders::reaching().
  static uint32_t reaching(FloatsAt at, int64_t begin, uint32_t low) {
    const Vector lowest = Registers::all(float_of(low));
    uint32_t reaching = 0;
    for (int64_t i = 0; i < kChunk; i += kElems) {
      const auto x = load_at<Vector>(at.floats, begin + i);
      reaching |= uint32_t{Registers::reaching(x, lowest)} << i;
    }
    return reaching;
  }
  template <class At>
  static uint32_t reaching(At at, int64_t begin, uint32_t low) {
    return ElementEncoders::reaching(at, begin, low);
  }

 private:
  template <class Feedback>
  [[gnu::always_inline]] static Vector meant(const Feedback& feedback, int64_t i) {
    if (i % kLineElems == 0) feedback.fetch_ahead(i);
    return feedback.template meant<Vector>(i);
  }

  static void encode_float16(const ResidualFeedback& feedback, std::byte* payload, int64_t i) {
    const auto before = load_at<Vector>(feedback.residual, i);
    const Vector x = meant(feedback, i);
    const auto halves = Registers::to_float16(x);
    std::byte* const to = payload + i * int64_t{sizeof(Float16)};
    __builtin_prefetch(to + kFetchedAheadBytes, 1);
    store(to, 0, halves);
    const Vector said = Registers::to_float(halves);
    store_at(feedback.residual, i, Registers::where_finite(said, x - said, before));
  }

  // As shifted_code() has it, but for the clamping: a quotient is beyond the codes only where the scale is so small
  // that it lost digits.
  template <class Feedback>
  static void encode_int8(const BlockPayload& payload, const Feedback& feedback, int64_t begin) {
    Vector x[kRegisters];
    Vector largest = {};
#pragma GCC unroll 32
    for (int64_t r = 0; r < kRegisters; ++r) {
      x[r] = meant(feedback, begin + r * kElems);
      largest = Registers::larger_magnitude(largest, x[r]);
    }
    const float scale = scale_of_largest(Registers::largest(largest));
    const float divisor = scale == 0 ? 1 : scale;  // says nothing of what is so small
    if (!(divisor >= std::numeric_limits<float>::min())) {
      return encode_block<Int8Code>(payload, feedback, begin, kEncodedBlock);
    }
    store(payload.scales, begin / kEncodedBlock, scale);
    const Vector step = Registers::all(divisor);
    const Vector rounder = Registers::all(kRounder);
#pragma GCC unroll 32
    for (int64_t r = 0; r < kRegisters; ++r) {
      const Vector shifted = x[r] / step + rounder;
      Registers::store_low_bytes(payload.codes + begin + r * kElems, shifted);
      feedback.template keep<Vector>(begin + r * kElems, x[r], step * (shifted - rounder));
    }
  }

  template <class Feedback>
  static void encode_sign(const BlockPayload& payload, const Feedback& feedback, int64_t begin) {
    constexpr int64_t kSums = kMeanLanes / kElems;
    Vector x[kRegisters];
    Vector sums[kSums] = {};
#pragma GCC unroll 32
    for (int64_t r = 0; r < kRegisters; ++r) {
      x[r] = meant(feedback, begin + r * kElems);
      sums[r % kSums] = sums[r % kSums] + Registers::magnitude(x[r]);
    }
    for (int64_t width = kSums / 2; width > 0; width /= 2) {
      for (int64_t s = 0; s < width; ++s) sums[s] = sums[s] + sums[s + width];
    }
    const float scale = finite_or_nan(Registers::sum(sums[0]) / float{kEncodedBlock});
    store(payload.scales, begin / kEncodedBlock, scale);
    const Vector positive = Registers::all(scale);
    const bool keeps = is_finite(scale) || Feedback::kTakesNonFinite;
#pragma GCC unroll 32
    for (int64_t r = 0; r < kRegisters; ++r) {
      store(payload.codes + begin / 8, r, Registers::negative(x[r]));
      if (!keeps) continue;
      feedback.template keep<Vector>(begin + r * kElems, x[r],
                                     Registers::with_sign_of(positive, x[r]));
    }
  }
};

}  // namespace
}  // namespace psstore
