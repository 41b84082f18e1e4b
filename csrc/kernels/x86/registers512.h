// Contributions in registers of sixteen floats: AVX-512.
//
// Included only by avx512.cc: see loops.h for why everything is in an unnamed namespace.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstddef>

#include "core/types.h"
#include "kernels/elements.h"
#include "kernels/x86/registers256.h"

namespace psstore {
namespace {

struct Registers512 {
  using Vector = __m512;
  using Halves = __m256i;
  static constexpr int64_t kElems = 16;

  [[gnu::always_inline]] static Vector all(float element) { return _mm512_set1_ps(element); }

  // Names all lanes where an intrinsic without a mask would do: GCC 12 warns of those, of memory in its own
  // header that is not initialised (its bug 105593).
  static constexpr __mmask16 kEach = 0xFFFF;

  // The elements at `data`, which for an encoding are codes of a block with this scale.
  template <DType dtype>
  [[gnu::always_inline]] static Vector read(const std::byte* data, Vector scale) {
    if constexpr (dtype == DType::kFloat32) return load<Vector>(data, 0);
    if constexpr (dtype == DType::kBFloat16) {
      const __m512i bits = _mm512_maskz_cvtepu16_epi32(kEach, load<__m256i>(data, 0));
      return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(kEach, bits, 16));
    }
    if constexpr (dtype == DType::kFloat16) {
      return to_float(load<Halves>(data, 0));
    }
    if constexpr (dtype == DType::kInt8) {
      return scale * _mm512_maskz_cvtepi32_ps(
                         kEach, _mm512_maskz_cvtepi8_epi32(kEach, load<__m128i>(data, 0)));
    }
    if constexpr (dtype == DType::kSign) {
      const auto negative = load<__mmask16>(data, 0);
      return _mm512_mask_xor_ps(scale, negative, scale, all(-0.0F));
    }
  }

  [[gnu::always_inline]] static Vector to_float(Halves halves) {
    return _mm512_maskz_cvtph_ps(kEach, halves);
  }
  [[gnu::always_inline]] static Halves to_float16(Vector x) {
    return _mm512_maskz_cvtps_ph(kEach, x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }

  // One or the other of each two, as `said` is finite or not.
  [[gnu::always_inline]] static Vector where_finite(Vector said, Vector then, Vector otherwise) {
    return _mm512_mask_mov_ps(then, reaching(said, all(INFINITY)), otherwise);
  }

  [[gnu::always_inline]] static Vector magnitude(Vector x) {
    return _mm512_maskz_andnot_ps(kEach, all(-0.0F), x);
  }

  // Of each two, the first a magnitude: the larger magnitude, where NaN is larger than all.
  [[gnu::always_inline]] static Vector larger_magnitude(Vector magnitudes, Vector x) {
    return _mm512_castsi512_ps(_mm512_maskz_max_epi32(kEach, _mm512_castps_si512(magnitudes),
                                                      _mm512_castps_si512(magnitude(x))));
  }
  [[gnu::always_inline]] static float largest(Vector magnitudes) {
    return Registers256::largest(
        Registers256::larger_magnitude(half<0>(magnitudes), half<1>(magnitudes)));
  }

  // A bit for each element whose magnitude is the other's or larger.
  [[gnu::always_inline]] static uint16_t reaching(Vector x, Vector magnitudes) {
    return _mm512_cmpge_epi32_mask(_mm512_castps_si512(magnitude(x)),
                                   _mm512_castps_si512(magnitudes));
  }

  // The upper half onto the lower half, until one is left.
  [[gnu::always_inline]] static float sum(Vector x) {
    return Registers256::sum(half<0>(x) + half<1>(x));
  }

  // Of each element as an integer.
  [[gnu::always_inline]] static void store_low_bytes(std::byte* to, Vector x) {
    store(to, 0, _mm512_maskz_cvtepi32_epi8(kEach, _mm512_castps_si512(x)));
  }

  // A bit for each element.
  [[gnu::always_inline]] static uint16_t negative(Vector x) {
    return _mm512_movepi32_mask(_mm512_castps_si512(x));
  }
  [[gnu::always_inline]] static Vector with_sign_of(Vector magnitudes, Vector x) {
    return _mm512_maskz_or_ps(kEach, magnitudes, _mm512_maskz_and_ps(kEach, x, all(-0.0F)));
  }

 private:
  template <int upper>
  [[gnu::always_inline]] static __m256 half(Vector x) {
    return _mm512_maskz_extractf32x8_ps(0xFF, x, upper);
  }
};

}  // namespace
}  // namespace psstore
