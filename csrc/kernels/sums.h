// The sum of one block of a few contributions, element by element: the reference, which a compiler's vectoriser
// makes of what it can.
//
// Included only by reduce.h: see loops.h for why everything is in an unnamed namespace.
#pragma once

#include <span>
#include <utility>

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

// Encoded blocks are decoded into the first-level cache, one after the other, and added from there.
template <class T>
void add_encoded(BlockSum<T> sum, std::span<const Contribution> group, int64_t num_elems) {
  const int64_t begin = std::exchange(sum.begin, 0);
  const T divisor = std::exchange(sum.divisor, T(1));
  const T scale = std::exchange(sum.scale, T(1));
  for (const Contribution& contribution : group) {
    alignas(64) float decoded[kBlockElems];
    decode_range({contribution.dtype, contribution.data, contribution.num_bytes,
                  static_cast<uint64_t>(num_elems)},
                 begin, sum.count, decoded);
    if (&contribution == &group.back()) {
      sum.divisor = divisor;
      sum.scale = scale;
    }
    const Contribution floats{decoded, DType::kFloat32, contribution.weight};
    add_group<T, float, 1>(sum, &floats);
    sum.before = sum.after;
  }
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
      case DType::kTopK: return add_encoded(sum, group, num_elems);
    }
  }
};

}  // namespace
}  // namespace psstore
