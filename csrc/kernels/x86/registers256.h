// Contributions in registers of eight floats: AVX2 and F16C.
//
// Included only by avx2.cc: see loops.h for why everything is in an unnamed namespace.
#pragma once

#include <immintrin.h>

#include <cstddef>

#include "core/types.h"
#include "kernels/elements.h"

namespace psstore {
namespace {

struct Registers256 {
  using Vector = __m256;
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
    if constexpr (dtype == DType::kFloat16) return _mm256_cvtph_ps(load<__m128i>(data, 0));
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
};

}  // namespace
}  // namespace psstore
