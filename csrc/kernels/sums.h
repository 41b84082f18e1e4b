// The sum of one block of a few contributions, element by element: the reference, which a compiler's vectoriser
// makes of what it can.
//
// Included only by reduce.h: see loops.h for why everything is in an unnamed namespace.
#pragma once

#include <array>
#include <span>

#include "kernels/codec_decode.h"
#include "kernels/elements.h"
#include "kernels/update.h"

namespace psstore {
namespace {

// -0 and not +0 is what added to any x gives x: +0 + -0 would lose the sign.
template <class T>
constexpr std::array<T, kBlockElems> kNothing = [] {
  std::array<T, kBlockElems> nothing{};
  nothing.fill(-T(0));
  return nothing;
}();

// Contributions that are added in one pass.
constexpr size_t kLargestGroup = 8;

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
  // Of top-k contributions: where the entries of the next block begin, as far as somebody knows.
  std::span<int64_t> entries = {};
};

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

// Encoded blocks are decoded into the first-level cache, and added from there as `Sums` adds floats.
template <class Sums, class T>
void add_encoded(BlockSum<T> sum, std::span<const Contribution> group, int64_t num_elems) {
  alignas(64) float decoded[kLargestGroup][kBlockElems];
  Contribution floats[kLargestGroup];
  for (size_t k = 0; k < group.size(); ++k) {
    int64_t unknown = 0;
    decode_range(
        {group[k].dtype, group[k].data, group[k].num_bytes, static_cast<uint64_t>(num_elems)},
        sum.begin, sum.count, decoded[k], k < sum.entries.size() ? sum.entries[k] : unknown);
    floats[k] = {decoded[k], DType::kFloat32, group[k].weight};
  }
  sum.begin = 0;
  Sums::add(sum, std::span<const Contribution>(floats, group.size()), num_elems);
}

// Adds a group of contributions to a block of a slice of `num_elems` elements.
template <class T>
using AddBlock = void (*)(const BlockSum<T>& sum, const Contribution* group, int64_t num_elems);

struct ElementSums {
  // What adds 1, 2, 4 or 8 contributions of one dtype to short blocks, chosen once for a slice; or null.
  template <class T>
  static AddBlock<T> chosen(std::span<const Contribution>, T /*divisor*/) {
    return nullptr;
  }

  // Adds as many to a block of a slice of `num_elems` elements.
  // REQUIRES: the block begins at a multiple of kEncodedBlock, or lies between two of them.
  template <class T>
  static void add(const BlockSum<T>& sum, std::span<const Contribution> group, int64_t num_elems) {
    switch (group.front().dtype) {
      case DType::kFloat32: return add_group<T, float>(sum, group);
      case DType::kFloat64: return add_group<T, double>(sum, group);
      case DType::kBFloat16: return add_group<T, BFloat16>(sum, group);
      case DType::kFloat16: return add_group<T, Float16>(sum, group);
      case DType::kInt8:
      case DType::kSign:
      case DType::kTopK: return add_encoded<ElementSums>(sum, group, num_elems);
    }
  }
};

}  // namespace
}  // namespace psstore
