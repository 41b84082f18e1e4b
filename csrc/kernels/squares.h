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
// vector width. 16 doubles are four AVX registers: as many additions in flight as one takes cycles.
constexpr int64_t kLanes = 16;
static_assert(kBlockElems % kLanes == 0, "a block begins with lane 0");

// Exact for a float: the square of 24 bits fits the 53 of a double.
template <class T>
[[gnu::always_inline]] inline double square(const std::byte* data, int64_t index) {
  const double element = number<double>(load<T>(data, index));
  return element * element;
}

template <class T>
void add_squares(double* lanes, const std::byte* data, int64_t count) {
  int64_t begin = 0;
  for (; begin + kLanes <= count; begin += kLanes) {
    for_each_index(kLanes, [=](int64_t lane) { lanes[lane] += square<T>(data, begin + lane); });
  }
  for (int64_t i = begin; i < count; ++i) lanes[i - begin] += square<T>(data, i);
}

// Neighbours in pairs, then neighbouring pairs, and so on.
inline double sum_of_lanes(double* lanes) {
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t lane = 0; lane < width; ++lane)
      lanes[lane] = lanes[2 * lane] + lanes[2 * lane + 1];
  }
  return lanes[0];
}

template <class T>
double squares_of(const SliceUpdate& update) {
  BlockGradient<T> gradient(update, 1.0);
  double lanes[kLanes] = {};
  for (int64_t begin = 0; begin < update.num_elems; begin += kBlockElems) {
    const int64_t count = std::min(kBlockElems, update.num_elems - begin);
    add_squares<T>(lanes, gradient.block(begin, count), count);
  }
  return sum_of_lanes(lanes);
}

double reduced_squares_loop(const SliceUpdate& update) {
  return update.dtype == DType::kFloat64 ? squares_of<double>(update) : squares_of<float>(update);
}

}  // namespace
}  // namespace psstore
