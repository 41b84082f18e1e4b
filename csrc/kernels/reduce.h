// The gradient of one block of a slice: the weighted sum of the contributions in rank order, divided
// and scaled.
//
// Included only by loops.h and squares.h: see loops.h for why everything is in an unnamed namespace.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <span>

#include "kernels/codec_loops.h"
#include "kernels/elements.h"
#include "kernels/update.h"

namespace psstore {
namespace {

// One block of the sum: what was added so far, where it goes, and what is done to it afterwards.
template <class T>
struct BlockSum {
  const T* before;  // may be `after`
  T* after;         // kBlockElems
  int64_t begin;    // of the slice's elements
  int64_t count;
  // Each with a rounding of its own, as torch does that divides and scales a gradient in place. By 1 they
  // change nothing, and are free in a loop that waits for memory.
  T divisor = T(1);
  T scale = T(1);
};

// -0 and not +0 is what added to any x gives x: +0 + -0 would lose the sign.
template <class T>
constexpr std::array<T, kBlockElems> kNothing = [] {
  std::array<T, kBlockElems> nothing{};
  nothing.fill(-T(0));
  return nothing;
}();

// sum += w0*g0; sum += w1*g1; ... for `kGroup` contributions of one encoding: each product and each sum
// rounded by itself, the running sum in a register. A weight of 1 is not treated apart: the product is
// exact, and free in a loop that waits for memory.
template <class T, class Encoding, int kGroup>
void add_group(const BlockSum<T>& sum, const Contribution* group) {
  const std::byte* data[kGroup];
  T weight[kGroup];
  for (int k = 0; k < kGroup; ++k) {
    data[k] = static_cast<const std::byte*>(group[k].data) +
              sum.begin * static_cast<int64_t>(sizeof(Encoding));
    weight[k] = static_cast<T>(group[k].weight);
  }
  for_each_streamed<Encoding>(sum.count, data, [=](int64_t i) {
    T running = sum.before[i];
    for (int k = 0; k < kGroup; ++k) {
      running = running + weight[k] * number<T>(load<Encoding>(data[k], i));
    }
    sum.after[i] = running / sum.divisor * sum.scale;
  });
}

template <class T, class Encoding>
void add_group(const BlockSum<T>& sum, std::span<const Contribution> group) {
  switch (group.size()) {
    case 8: return add_group<T, Encoding, 8>(sum, group.data());
    case 4: return add_group<T, Encoding, 4>(sum, group.data());
    case 2: return add_group<T, Encoding, 2>(sum, group.data());
    default: return add_group<T, Encoding, 1>(sum, group.data());
  }
}

// An encoded block is decoded into the first-level cache and added from there.
template <class T>
void add_encoded(BlockSum<T> sum, const Contribution& contribution, int64_t num_elems) {
  alignas(64) float decoded[kBlockElems];
  decode_range({contribution.dtype, contribution.data, contribution.num_bytes,
                static_cast<uint64_t>(num_elems)},
               sum.begin, sum.count, decoded);
  const Contribution floats{decoded, DType::kFloat32, contribution.weight};
  sum.begin = 0;
  add_group<T, float, 1>(sum, &floats);
}

template <class T>
void add_group(const BlockSum<T>& sum, std::span<const Contribution> group, int64_t num_elems) {
  switch (group.front().dtype) {
    case DType::kFloat32: return add_group<T, float>(sum, group);
    case DType::kFloat64: return add_group<T, double>(sum, group);
    case DType::kBFloat16: return add_group<T, BFloat16>(sum, group);
    case DType::kFloat16: return add_group<T, Float16>(sum, group);
    case DType::kInt8:
    case DType::kSign:
    case DType::kTopK: return add_encoded(sum, group.front(), num_elems);
  }
}

// How many at the front are added in one pass: 8, 4 or 2 of one dtype that is no encoding, or 1.
inline size_t group_size(std::span<const Contribution> contributions) {
  constexpr size_t kLargest = 8;
  const DType dtype = contributions.front().dtype;
  if (is_encoding(dtype)) return 1;
  size_t length = 1;
  while (length < std::min(kLargest, contributions.size()) &&
         contributions[length].dtype == dtype) {
    ++length;
  }
  return std::bit_floor(length);
}

template <class T>
void reduce_block(const SliceUpdate& update, double scale, int64_t begin, int64_t count,
                  T* gradient) {
  std::span<const Contribution> rest = update.contributions;
  BlockSum<T> sum{kNothing<T>.data(), gradient, begin, count};
  const T divisor = static_cast<T>(update.divisor);
  if (rest.empty()) std::fill_n(gradient, count, T(0) / divisor * static_cast<T>(scale));
  while (!rest.empty()) {
    const std::span<const Contribution> group = rest.first(group_size(rest));
    rest = rest.subspan(group.size());
    if (rest.empty()) {
      sum.divisor = divisor;
      sum.scale = static_cast<T>(scale);
    }
    add_group(sum, group, update.num_elems);
    sum.before = gradient;
  }
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
    reduce_block(update_, scale_, begin, count, reduced_);
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
