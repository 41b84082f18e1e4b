// The sum of squares of a slice's reduced gradient: what a global norm is made of.
//
// Included only by the .cc file of each instruction set: see loops.h for the unnamed namespace.
#pragma once

#include <algorithm>

#include "kernels/elements.h"
#include "kernels/reduce.h"

namespace psstore {
namespace {

// Element i is added to partial sum i modulo kLanes, so that the order of the additions is the same at any
// vector width. 32 doubles are eight AVX registers: additions of four cycles each have to overlap
// (measured in the first-level cache with AVX2 and GCC: 8.5 GB/s with 8 lanes, 15 with 16, 23 with 32).
constexpr int64_t kLanes = 32;
static_assert(kBlockElems % kLanes == 0 && kShortestBlockElems % kLanes == 0,
              "a block begins with lane 0");

// Exact for a float: the square of 24 bits fits the 53 of a double.
template <class T>
[[gnu::always_inline]] inline double square(const std::byte* data, int64_t index) {
  const double element = number<double>(load<T>(data, index));
  return element * element;
}

// The loops over lanes have a constant count: unrolled, the local copy is in registers all along.
template <class T>
void add_squares(double* lanes, const std::byte* data, int64_t count) {
  constexpr int64_t kBytes = sizeof(T);
  double sums[kLanes];
  for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] = lanes[lane];
  int64_t begin = 0;
  for (; begin + kLanes <= count; begin += kLanes) {
    for (int64_t line = 0; line < kLanes * kBytes; line += kCacheLineBytes) {
      __builtin_prefetch(data + begin * kBytes + line + kFetchedAheadBytes);
    }
    for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += square<T>(data, begin + lane);
  }
  for (int64_t i = begin; i < count; ++i) sums[i - begin] += square<T>(data, i);
  for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] = sums[lane];
}

// The upper half onto the lower half, until one is left.
inline double sum_of_lanes(double* lanes) {
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

template <class Sums, class T>
double squares_of(const SliceUpdate& update) {
  BlockGradient<Sums, T> gradient(update, 1.0);
  double lanes[kLanes] = {};
  const int64_t block_elems = gradient.block_elems();
  for (int64_t begin = 0; begin < update.num_elems; begin += block_elems) {
    const int64_t count = std::min(block_elems, update.num_elems - begin);
    add_squares<T>(lanes, gradient.block(begin, count), count);
  }
  return sum_of_lanes(lanes);
}

template <class Sums>
double reduced_squares_loop(const SliceUpdate& update) {
  return update.dtype == DType::kFloat64 ? squares_of<Sums, double>(update)
                                         : squares_of<Sums, float>(update);
}

}  // namespace
}  // namespace psstore
