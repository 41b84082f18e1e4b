// The gradient of one block of a slice: the weighted sum of the contributions in rank order, divided
// and scaled.
//
// Included only by loops.h and squares.h: see loops.h for why everything is in an unnamed namespace.
#pragma once

#include <span>

#include "kernels/codec_loops.h"
#include "kernels/elements.h"
#include "kernels/update.h"

namespace psstore {
namespace {

// sum += w0*g0; sum += w1*g1; ... for `kGroup` contributions of one encoding: each product and each sum
// rounded by itself, the running sum in a register. A weight of 1 is not treated apart: the product is
// exact, and free in a loop that waits for memory.
template <class T, class Encoding, int kGroup>
void add_group(T* sum, const Contribution* group, int64_t begin, int64_t count) {
  const std::byte* data[kGroup];
  T weight[kGroup];
  for (int k = 0; k < kGroup; ++k) {
    data[k] = static_cast<const std::byte*>(group[k].data) +
              begin * static_cast<int64_t>(sizeof(Encoding));
    weight[k] = static_cast<T>(group[k].weight);
  }
  for_each_index(count, [=](int64_t i) {
    T running = sum[i];
    for (int k = 0; k < kGroup; ++k) {
      running = running + weight[k] * number<T>(load<Encoding>(data[k], i));
    }
    sum[i] = running;
  });
}

template <class T, class Encoding>
void add_run(T* sum, std::span<const Contribution> run, int64_t begin, int64_t count) {
  const Contribution* next = run.data();
  size_t left = run.size();
  for (; left >= 8; left -= 8, next += 8) add_group<T, Encoding, 8>(sum, next, begin, count);
  if (left >= 4) {
    add_group<T, Encoding, 4>(sum, next, begin, count);
    next += 4;
    left -= 4;
  }
  if (left >= 2) {
    add_group<T, Encoding, 2>(sum, next, begin, count);
    next += 2;
    left -= 2;
  }
  if (left == 1) add_group<T, Encoding, 1>(sum, next, begin, count);
}

// An encoded block is decoded into the first-level cache and added from there.
template <class T>
void add_encoded(T* sum, const Contribution& contribution, int64_t num_elems, int64_t begin,
                 int64_t count) {
  alignas(64) float decoded[kBlockElems];
  decode_range({contribution.dtype, contribution.data, contribution.num_bytes,
                static_cast<uint64_t>(num_elems)},
               begin, count, decoded);
  const Contribution floats{decoded, DType::kFloat32, contribution.weight};
  add_group<T, float, 1>(sum, &floats, 0, count);
}

template <class T>
void add_run(T* sum, std::span<const Contribution> run, int64_t num_elems, int64_t begin,
             int64_t count) {
  switch (run.front().dtype) {
    case DType::kFloat32: return add_run<T, float>(sum, run, begin, count);
    case DType::kFloat64: return add_run<T, double>(sum, run, begin, count);
    case DType::kBFloat16: return add_run<T, BFloat16>(sum, run, begin, count);
    case DType::kFloat16: return add_run<T, Float16>(sum, run, begin, count);
    case DType::kInt8:
    case DType::kSign:
    case DType::kTopK:
      for (const Contribution& one : run) add_encoded(sum, one, num_elems, begin, count);
  }
}

// How many contributions at the front have one encoding.
inline size_t run_length(std::span<const Contribution> contributions) {
  size_t length = 1;
  while (length < contributions.size() && contributions[length].dtype == contributions[0].dtype) {
    ++length;
  }
  return length;
}

template <class T>
void reduce_block(const SliceUpdate& update, int64_t begin, int64_t count, T* gradient) {
  std::span<const Contribution> rest = update.contributions;
  // -0 and not +0 is what added to any x gives x: +0 + -0 would lose the sign.
  const T nothing = rest.empty() ? T(0) : -T(0);
  for_each_index(count, [=](int64_t i) { gradient[i] = nothing; });
  while (!rest.empty()) {
    const size_t length = run_length(rest);
    add_run<T>(gradient, rest.first(length), update.num_elems, begin, count);
    rest = rest.subspan(length);
  }
  if (update.divisor != 1.0) {
    const T divisor = static_cast<T>(update.divisor);
    for_each_index(count, [=](int64_t i) { gradient[i] = gradient[i] / divisor; });
  }
}

// One rounding of its own, after the division's: what torch does that scales a gradient in place.
template <class T>
void scale_block(T* gradient, int64_t count, T scale) {
  for_each_index(count, [=](int64_t i) { gradient[i] = gradient[i] * scale; });
}

// Where the gradient of the slice can be read as it came, without a sum.
template <class T>
const std::byte* sole_gradient(const SliceUpdate& update) {
  if (update.contributions.size() != 1 || update.divisor != 1.0) return nullptr;
  const Contribution& sole = update.contributions.front();
  if (sole.dtype != update.dtype || sole.weight != 1.0F) return nullptr;
  return static_cast<const std::byte*>(sole.data);
}

// The gradient of a slice, times `scale`, a block at a time.
template <class T>
class BlockGradient {
 public:
  BlockGradient(const SliceUpdate& update, double scale)
      : update_(update), scale_(scale), sole_(scale == 1.0 ? sole_gradient<T>(update) : nullptr) {}

  // The elements from `begin` on, at most kBlockElems; valid until the next call.
  const std::byte* block(int64_t begin, int64_t count) {
    if (sole_ != nullptr) return sole_ + begin * static_cast<int64_t>(sizeof(T));
    reduce_block(update_, begin, count, reduced_);
    if (scale_ != 1.0) scale_block(reduced_, count, static_cast<T>(scale_));
    return reinterpret_cast<const std::byte*>(reduced_);
  }

 private:
  const SliceUpdate& update_;
  const double scale_;
  const std::byte* const sole_;
  alignas(64) T reduced_[kBlockElems];
};

}  // namespace
}  // namespace psstore
