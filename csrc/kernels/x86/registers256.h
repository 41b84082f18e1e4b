// Contributions in registers of eight floats: AVX2 and F16C.
//
// Included only by avx2.cc: see loops.h for why everything is in an unnamed namespace.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstddef>

#include "core/types.h"
#include "kernels/elements.h"

namespace psstore {
namespace {

struct Registers256 {
  using Vector = __m256;
  using Halves = __m128i;
  static constexpr int64_t kElems = 8;

  [[gnu::always_inline]] static Vector all(float element) { return _mm256_set1_ps(element); }

  // The elements at `data`, which for an encoding are codes of a block with this scale.
  template <DType dtype>
  [[gnu::always_inline]] static Vector read(const std::byte* data, Vector scale) {
    if constexpr (dtype == DType::kFloat32) return load<Vector>(data, 0);
    if constexpr (dtype == DType::kBFloat16) {
      const __m256i bits = _mm256_cvtepu16_epi32(load<__m128i>(data, 0));
      return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
    }
    if constexpr (dtype == DType::kFloat16) return to_float(load<Halves>(data, 0));
    if constexpr (dtype == DType::kInt8) {
      const __m128i codes = _mm_cvtsi64_si128(load<long long>(data, 0));
      return scale * _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
    }
    if constexpr (dtype == DType::kSign) {
      const __m256i byte = _mm256_set1_epi32(load<uint8_t>(data, 0));
      const __m256i to_sign = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
      const __m256 shifted = _mm256_castsi256_ps(_mm256_sllv_epi32(byte, to_sign));
      return _mm256_xor_ps(scale, _mm256_and_ps(shifted, all(-0.0F)));
    }
  }

  [[gnu::always_inline]] static Vector to_float(Halves halves) { return _mm256_cvtph_ps(halves); }
  [[gnu::always_inline]] static Halves to_float16(Vector x) {
    return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }

  // One or the other of each two, as `said` is finite or not.
  [[gnu::always_inline]] static Vector where_finite(Vector said, Vector then, Vector otherwise) {
    const __m256i is_finite = _mm256_cmpgt_epi32(_mm256_castps_si256(all(INFINITY)),
                                                 _mm256_castps_si256(magnitude(said)));
    return _mm256_blendv_ps(otherwise, then, _mm256_castsi256_ps(is_finite));
  }

  [[gnu::always_inline]] static Vector magnitude(Vector x) {
    return _mm256_andnot_ps(all(-0.0F), x);
  }

  // Of each two, the first a magnitude: the larger magnitude, where NaN is larger than all.
  [[gnu::always_inline]] static Vector larger_magnitude(Vector magnitudes, Vector x) {
    return _mm256_castsi256_ps(
        _mm256_max_epi32(_mm256_castps_si256(magnitudes), _mm256_castps_si256(magnitude(x))));
  }
  [[gnu::always_inline]] static float largest(Vector magnitudes) {
    const __m256i all_eight = _mm256_castps_si256(magnitudes);
    __m128i rest =
        _mm_max_epi32(_mm256_castsi256_si128(all_eight), _mm256_extracti128_si256(all_eight, 1));
    rest = _mm_max_epi32(rest, _mm_unpackhi_epi64(rest, rest));
    rest = _mm_max_epi32(rest, _mm_shuffle_epi32(rest, 1));
    return _mm_cvtss_f32(_mm_castsi128_ps(rest));
  }

  // A bit for each element whose magnitude is the other's or larger.
  [[gnu::always_inline]] static uint8_t reaching(Vector x, Vector magnitudes) {
    const __m256i below =
        _mm256_cmpgt_epi32(_mm256_castps_si256(magnitudes), _mm256_castps_si256(magnitude(x)));
    return static_cast<uint8_t>(~_mm256_movemask_ps(_mm256_castsi256_ps(below)));
  }

  // The upper half onto the lower half, until one is left.
  [[gnu::always_inline]] static float sum(Vector x) {
    const __m128 four = _mm256_castps256_ps128(x) + _mm256_extractf128_ps(x, 1);
    const __m128 two = four + _mm_movehl_ps(four, four);
    return two[0] + two[1];
  }

  // Of each element as an integer.
  [[gnu::always_inline]] static void store_low_bytes(std::byte* to, Vector x) {
    const __m256i low = _mm256_shuffle_epi8(_mm256_castps_si256(x), _mm256_set1_epi32(0x0C080400));
    store(to, 0,
          _mm_unpacklo_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1))[0]);
  }

  // A bit for each element.
  [[gnu::always_inline]] static uint8_t negative(Vector x) {
    return static_cast<uint8_t>(_mm256_movemask_ps(x));
  }
  [[gnu::always_inline]] static Vector with_sign_of(Vector magnitudes, Vector x) {
    return _mm256_or_ps(magnitudes, _mm256_and_ps(x, all(-0.0F)));
  }
};

}  // namespace
}  // namespace psstore
