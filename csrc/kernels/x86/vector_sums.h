// The sum of one block of a few contributions, register by register: float32 sums of whatever widens in a register.
//
// A compiler's vectoriser makes slow code of half precision and of bytes (docs/performance.md), and what is
// decoded to memory first is read again. `Registers` says how a register of each dtype is read.
//
// Included only by the .cc file of an instruction set: see loops.h for the unnamed namespace.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>

#include "kernels/sums.h"

namespace psstore {
namespace {

// Of one element; of an encoding without its scale.
constexpr int64_t bits_of_element(DType dtype) {
  if (dtype == DType::kSign) return 1;
  if (dtype == DType::kInt8) return 8;
  return static_cast<int64_t>(8 * dtype_bytes(dtype));
}

// A power of two is divided by when multiplied by its inverse: the same number, rounded once.
inline bool has_exact_inverse(float divisor) {
  int exponent = 0;
  return std::frexp(divisor, &exponent) == 0.5F && std::isfinite(1 / divisor);
}

template <class Registers>
struct VectorSums {
  using Vector = typename Registers::Vector;

  // As ElementSums, which does what does not fill a short block.
  static void add(BlockSum<float> sum, std::span<const Contribution> group, int64_t num_elems) {
    if (group.front().dtype == DType::kTopK) return add_encoded<VectorSums>(sum, group, num_elems);
    const AddBlock<float> add_whole = chosen(group, sum.divisor);
    const int64_t rest = add_whole == nullptr ? sum.count : sum.count % kShortBlockElems;
    sum.count -= rest;
    if (sum.count > 0) add_whole(sum, group.data(), num_elems);
    if (rest == 0) return;
    sum.before += sum.count;
    sum.after += sum.count;
    sum.begin += sum.count;
    sum.count = rest;
    ElementSums::add(sum, group, num_elems);
  }
  static void add(const BlockSum<double>& sum, std::span<const Contribution> group,
                  int64_t num_elems) {
    ElementSums::add(sum, group, num_elems);
  }

  static AddBlock<float> chosen(std::span<const Contribution> group, float divisor) {
    switch (group.front().dtype) {
      case DType::kFloat32: return chosen<DType::kFloat32>(group, divisor);
      case DType::kBFloat16: return chosen<DType::kBFloat16>(group, divisor);
      case DType::kFloat16: return chosen<DType::kFloat16>(group, divisor);
      case DType::kInt8: return chosen<DType::kInt8>(group, divisor);
      case DType::kSign: return chosen<DType::kSign>(group, divisor);
      case DType::kFloat64:
      case DType::kTopK: break;
    }
    return nullptr;
  }
  static AddBlock<double> chosen(std::span<const Contribution>, double) { return nullptr; }

 private:
  template <DType dtype>
  static constexpr int64_t kLineElems =
      std::min(kShortBlockElems, 8 * kCacheLineBytes / bits_of_element(dtype));

  template <DType dtype>
  static AddBlock<float> chosen(std::span<const Contribution> group, float divisor) {
    switch (group.size()) {
      case 8: return chosen<dtype, 8>(group, divisor);
      case 4: return chosen<dtype, 4>(group, divisor);
      case 2: return chosen<dtype, 2>(group, divisor);
      default: return chosen<dtype, 1>(group, divisor);
    }
  }

  // The mean of as many as a power of two is the common case, and has less arithmetic than the general one.
  template <DType dtype, int kGroup>
  static AddBlock<float> chosen(std::span<const Contribution> group, float divisor) {
    const bool unweighted = std::all_of(group.begin(), group.end(),
                                        [](const Contribution& one) { return one.weight == 1.0F; });
    return unweighted && has_exact_inverse(divisor) ? add_mean<dtype, kGroup>
                                                    : add_weighted<dtype, kGroup>;
  }

  template <DType dtype, int kGroup>
  static void add_mean(const BlockSum<float>& sum, const Contribution* group, int64_t num_elems) {
    add_lines<dtype, kGroup>(
        sum, group, num_elems,
        [inverse = Registers::all(1 / sum.divisor)](Vector total) { return total * inverse; },
        [](Vector element, int) { return element; });
  }

  template <DType dtype, int kGroup>
  static void add_weighted(const BlockSum<float>& sum, const Contribution* group,
                           int64_t num_elems) {
    Vector weights[kGroup];
    for (int k = 0; k < kGroup; ++k) weights[k] = Registers::all(group[k].weight);
    add_lines<dtype, kGroup>(
        sum, group, num_elems,
        [divisor = Registers::all(sum.divisor)](Vector total) { return total / divisor; },
        [&weights](Vector element, int k) { return weights[k] * element; });
  }

  // sum = divide(sum + weigh(g0) + weigh(g1) + ...) * scale, a cache line of each at a time, fetched ahead.
  template <DType dtype, int kGroup, class Divide, class Weigh>
  [[gnu::always_inline]] static void add_lines(const BlockSum<float>& sum,
                                               const Contribution* group, int64_t num_elems,
                                               Divide divide, Weigh weigh) {
    constexpr int64_t kBits = bits_of_element(dtype);
    const std::byte* codes[kGroup];
    Vector scales[kGroup] = {};
    for (int k = 0; k < kGroup; ++k) {
      codes[k] = static_cast<const std::byte*>(group[k].data) +
                 (is_encoding(dtype) ? codes_offset(num_elems) : 0) + sum.begin * kBits / 8;
    }
    const Vector scale = Registers::all(sum.scale);
    const float* before = sum.before;
    float* after = sum.after;
    for (int64_t line = 0; line < sum.count; line += kLineElems<dtype>) {
      for (int k = 0; k < kGroup; ++k) {
        __builtin_prefetch(codes[k] + line * kBits / 8 + kFetchedAheadBytes);
        if constexpr (!is_encoding(dtype)) continue;
        const auto* of_blocks = static_cast<const std::byte*>(group[k].data);
        scales[k] = Registers::all(load<float>(of_blocks, (sum.begin + line) / kEncodedBlock));
      }
      for (int64_t i = line; i < line + kLineElems<dtype>; i += Registers::kElems) {
        Vector total;
        std::memcpy(&total, before + i, sizeof total);
        for (int k = 0; k < kGroup; ++k) {
          total = total +
                  weigh(Registers::template read<dtype>(codes[k] + i * kBits / 8, scales[k]), k);
        }
        total = divide(total) * scale;
        std::memcpy(after + i, &total, sizeof total);
      }
    }
  }
};

}  // namespace
}  // namespace psstore
