// topk: which elements are kept, and a range of a payload as floats.
//
// Included only by codec_loops.h: see loops.h for why everything is in an unnamed namespace.
#pragma once

#include <array>

#include "kernels/codec_blocks.h"

namespace psstore {
namespace {

// Elements above `magnitude` are kept, and the first `num_equal` of those that have it.
struct Cut {
  uint32_t magnitude = 0;
  int64_t num_equal = 0;
};

// The k-th largest magnitude, digit by digit from the highest on: each pass counts the elements that share
// the digits found so far by their next one, so that no memory is needed and no order of the elements
// matters. `at(i)` is element i. REQUIRES: 1 <= k <= num_elems.
template <class At>
Cut find_cut(At at, int64_t num_elems, int64_t k) {
  constexpr int kDigitBits[] = {11, 10, 10};  // of 31: no sign
  std::array<uint32_t, 1 << kDigitBits[0]> counts;
  Cut cut{0, k};
  int shift = 31;
  for (const int bits : kDigitBits) {
    counts.fill(0);
    const int shift_above = shift;
    shift -= bits;
    const uint32_t mask = (1U << bits) - 1;
    for (int64_t i = 0; i < num_elems; ++i) {
      const uint32_t magnitude = magnitude_bits(at(i));
      if (magnitude >> shift_above == cut.magnitude) ++counts[magnitude >> shift & mask];
    }
    uint32_t digit = mask;
    for (; counts[digit] < cut.num_equal; --digit) cut.num_equal -= counts[digit];
    cut.magnitude = cut.magnitude << bits | digit;
  }
  return cut;
}

// `at(i)` is what is to be encoded of element i.
template <class At>
void encode_topk(At at, const ToEncode& what) {
  auto* indices = static_cast<std::byte*>(what.payload);
  std::byte* values = indices + what.num_kept * static_cast<int64_t>(sizeof(uint32_t));
  auto* residual = static_cast<std::byte*>(what.residual);
  Cut cut{~0U, 0};  // above all that there is
  if (what.num_kept > 0) cut = find_cut(at, what.num_elems, what.num_kept);
  int64_t num_kept = 0;
  for (int64_t i = 0; i < what.num_elems; ++i) {
    const float x = at(i);
    const uint32_t magnitude = magnitude_bits(x);
    const bool kept =
        magnitude > cut.magnitude || (magnitude == cut.magnitude && cut.num_equal-- > 0);
    if (residual != nullptr && is_finite(x)) store(residual, i, kept ? 0.0F : x);
    if (!kept) continue;
    store(indices, num_kept, static_cast<uint32_t>(i));
    store(values, num_kept, x);
    ++num_kept;
  }
}

inline void encode_topk(const ToEncode& what) {
  const auto* source = static_cast<const std::byte*>(what.source);
  const auto* residual = static_cast<const std::byte*>(what.residual);
  if (residual == nullptr) {
    encode_topk([=](int64_t i) { return load<float>(source, i); }, what);
  } else {
    encode_topk([=](int64_t i) { return load<float>(source, i) + load<float>(residual, i); }, what);
  }
}

// Position of the first index that is not below `index`.
inline int64_t find_index(const std::byte* indices, int64_t num_kept, int64_t index) {
  int64_t begin = 0;
  for (int64_t end = num_kept; begin < end;) {
    const int64_t middle = begin + (end - begin) / 2;
    if (load<uint32_t>(indices, middle) < index) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

// Indices that do not ascend spoil the block and reach nothing outside of it: they may lie in memory that
// somebody else can still write to.
inline void decode_topk(const Encoded& encoded, int64_t begin, int64_t count, float* out) {
  const auto num_kept = static_cast<int64_t>(encoded.num_bytes / kTopKEntryBytes);
  const auto* indices = static_cast<const std::byte*>(encoded.payload);
  const std::byte* values = indices + num_kept * static_cast<int64_t>(sizeof(uint32_t));
  std::fill_n(out, count, 0.0F);
  for (int64_t i = find_index(indices, num_kept, begin); i < num_kept; ++i) {
    const int64_t place = load<uint32_t>(indices, i) - begin;
    if (place < 0 || place >= count) return;
    out[place] = load<float>(values, i);
  }
}

}  // namespace
}  // namespace psstore
