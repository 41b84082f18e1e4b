// Element by element: conversions, the check for finite values, decoding.
#pragma once

#include "kernels/gpu/block.h"
#include "kernels/gpu/sources.h"

namespace psstore::gpu {

template <class To, class From>
PSSTORE_GPU To converted(From element) {
  if constexpr (std::is_same_v<To, BFloat16>) {
    return to_bfloat16(number<float>(element));
  } else if constexpr (std::is_same_v<To, Float16>) {
    return to_float16(number<float>(element));
  } else {
    return number<To>(element);
  }
}

// What one thread takes of such a pass.
inline constexpr int kConvertElems = 4;

// Elements of one dtype, as another.
template <class From, class To>
struct Converted {
  const void* source;

  template <int N>
  PSSTORE_GPU Pack<To, N> pack(const VectorMap&, int64_t begin) const {
    const Pack<From, N> in = load_widely<From, N>(source, begin);
    Pack<To, N> out;
    for (int e = 0; e < N; ++e) out[e] = converted<To>(in[e]);
    return out;
  }
};

// What an encoding says, as float32.
struct Decoded {
  Source source;

  template <int N>
  PSSTORE_GPU Pack<float, N> pack(const VectorMap& vectors, int64_t begin) const {
    return load_encoded<N>(source, vectors.num_elems, begin);
  }
};

// Writes each element of `Elements` to its place.
template <class Elements>
struct WriteBody {
  using Shared = Nothing;
  using Local = Nothing;
  static constexpr int kMinBlocks = 4;

  VectorMap vectors;
  Grid grid;
  Elements elements;
  void* destination;

  PSSTORE_GPU int num_phases(int64_t) const { return 1; }
  PSSTORE_GPU void run(int, int64_t block, int thread, Local&, Shared&) const {
    for (int64_t chunk = grid.begin(block); chunk < grid.end(block); ++chunk) {
      visit_vector(
          vectors, vectors.begin(chunk, thread),
          [&](int64_t begin) { write<kConvertElems>(begin); }, [&](int64_t i) { write<1>(i); });
    }
  }

 private:
  template <int N>
  PSSTORE_GPU void write(int64_t begin) const {
    store_pack(destination, begin, elements.template pack<N>(vectors, begin));
  }
};

// NaN and the infinities are the numbers whose exponent bits are all set.
template <class Bits, Bits kExponent>
struct ExponentTest {
  using Element = Bits;
  PSSTORE_GPU bool is_finite(Bits bits) const { return (bits & kExponent) != kExponent; }
};

using Float32Test = ExponentTest<uint32_t, 0x7F800000U>;
using Float64Test = ExponentTest<uint64_t, 0x7FF0000000000000U>;
using BFloat16Test = ExponentTest<uint16_t, 0x7F80U>;
using Float16Test = ExponentTest<uint16_t, 0x7C00U>;

// A scale whose product with the largest code is beyond float is none either.
struct ScaleTest {
  using Element = float;
  PSSTORE_GPU bool is_finite(float scale) const { return psstore::is_finite(scale * largest_code); }
  float largest_code;
};

template <class Test>
struct FiniteBody {
  using Element = typename Test::Element;
  using Shared = Nothing;
  using Local = Nothing;
  static constexpr int kMinBlocks = 4;
  static constexpr int kElems = kVectorElems<Element>;

  VectorMap vectors;
  Grid grid;
  const void* data;
  Test test;
  uint32_t* flag;

  PSSTORE_GPU int num_phases(int64_t) const { return 1; }
  PSSTORE_GPU void run(int, int64_t block, int thread, Local&, Shared&) const {
    bool finite = true;
    for (int64_t chunk = grid.begin(block); chunk < grid.end(block); ++chunk) {
      visit_vector(
          vectors, vectors.begin(chunk, thread),
          [&](int64_t begin) { finite = are_finite<kElems>(begin) && finite; },
          [&](int64_t i) { finite = are_finite<1>(i) && finite; });
    }
    if (!finite) set_atomically(flag);
  }

 private:
  template <int N>
  PSSTORE_GPU bool are_finite(int64_t begin) const {
    const Pack<Element, N> pack = load_widely<Element, N>(data, begin);
    bool finite = true;
    for (int e = 0; e < N; ++e) finite = test.is_finite(pack[e]) && finite;
    return finite;
  }
};

}  // namespace psstore::gpu
