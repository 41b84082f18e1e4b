// topk: which elements are kept, and a range of a payload as floats.
//
// Included only by codec_loops.h: see loops.h for why everything is in an unnamed namespace.
#pragma once

#include <array>

#include "kernels/codec_blocks.h"

namespace psstore {
namespace {

constexpr int64_t kChunk = 32;
constexpr std::array<uint32_t, kChunk> kChunkBits = [] {
  std::array<uint32_t, kChunk> bits{};
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = 1U << i;
  return bits;
}();

// Which of `count` elements from `begin` on have a magnitude that passes the test, a bit for each.
template <class At, class Test>
[[gnu::always_inline]] inline uint32_t passing(At at, int64_t begin, int64_t count, Test test) {
  uint32_t passed = 0;
#pragma omp simd reduction(| : passed)
  for (int64_t i = 0; i < count; ++i) {
    passed |= test(magnitude_bits(at(begin + i))) ? kChunkBits[static_cast<size_t>(i)] : 0U;
  }
  return passed;
}

// Calls `visit(i, x)` for the few elements x = at(i) whose magnitude passes the test.
template <class At, class Test, class Visit>
void visit_few(At at, int64_t num_elems, Test test, Visit visit) {
  const auto visit_chunk = [&](int64_t begin, uint32_t passed) {
    for (; passed != 0; passed &= passed - 1) {
      const int64_t i = begin + std::countr_zero(passed);
      visit(i, at(i));
    }
  };
  int64_t begin = 0;
  for (; begin + kChunk <= num_elems; begin += kChunk) {
    visit_chunk(begin, passing(at, begin, kChunk, test));
  }
  visit_chunk(begin, passing(at, begin, num_elems - begin, test));
}

constexpr int kFirstDigitShift = 31 - kDigitBits[0];
using DigitCounts = std::array<uint32_t, 1 << kDigitBits[0]>;

// The highest digit that, with those above, was counted `k` times at least; `k` becomes how many of the digit
// itself these are. REQUIRES: that many were counted.
inline uint32_t digit_of(const DigitCounts& counts, uint32_t highest, int64_t& k) {
  uint32_t digit = highest;
  for (; counts[digit] < k; --digit) k -= counts[digit];
  return digit;
}

// A magnitude that k elements reach, with as few others as a glance shows: so many chunks have one that does.
// 0 where k is too large for that.
template <class At>
uint32_t low_magnitude(At at, int64_t num_elems, int64_t k) {
  const int64_t num_chunks = num_elems / kChunk;
  if (num_chunks < k) return 0;
  DigitCounts counts{};
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    int32_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t i = chunk * kChunk; i < (chunk + 1) * kChunk; ++i) {
      const auto magnitude = static_cast<int32_t>(magnitude_bits(at(i)));
      largest = magnitude > largest ? magnitude : largest;
    }
    ++counts[static_cast<uint32_t>(largest) >> kFirstDigitShift];
  }
  return digit_of(counts, counts.size() - 1, k) << kFirstDigitShift;
}

// The k-th largest magnitude, digit by digit from the highest on: each pass counts the elements that share
// the digits found so far by their next one, so that no memory is needed and no order of the elements
// matters. `at(i)` is element i. REQUIRES: 1 <= k <= num_elems.
template <class At>
Cut find_cut(At at, int64_t num_elems, int64_t k) {
  const uint32_t low = low_magnitude(at, num_elems, k);
  DigitCounts counts;
  Cut cut{0, k};
  int shift = 31;
  for (const int bits : kDigitBits) {
    counts.fill(0);
    const int shift_above = shift;
    shift -= bits;
    const uint32_t mask = (1U << bits) - 1;
    const auto counted = [=](uint32_t magnitude) {
      return magnitude >= low && magnitude >> shift_above == cut.magnitude;
    };
    visit_few(at, num_elems, counted,
              [&](int64_t, float x) { ++counts[magnitude_bits(x) >> shift & mask]; });
    cut.magnitude = cut.magnitude << bits | digit_of(counts, mask, cut.num_equal);
  }
  return cut;
}

// The payload. `at(i)` is what is to be encoded of element i.
template <class At>
void encode_topk(At at, const ToEncode& what) {
  auto* indices = static_cast<std::byte*>(what.payload);
  std::byte* values = indices + what.num_kept * static_cast<int64_t>(sizeof(uint32_t));
  Cut cut = kKeepNothing;
  if (what.num_kept > 0) cut = find_cut(at, what.num_elems, what.num_kept);
  int64_t num_kept = 0;
  visit_few(
      at, what.num_elems, [=](uint32_t magnitude) { return magnitude >= cut.magnitude; },
      [&](int64_t i, float x) {
        if (magnitude_bits(x) == cut.magnitude && cut.num_equal-- <= 0) return;
        store(indices, num_kept, static_cast<uint32_t>(i));
        store(values, num_kept, x);
        ++num_kept;
      });
}

// The residual of the same: x, and nothing of what is kept.
template <class At>
void keep_topk(At at, const ToEncode& what) {
  auto* residual = static_cast<std::byte*>(what.residual);
  const auto* indices = static_cast<const std::byte*>(what.payload);
  const std::byte* values = indices + what.num_kept * static_cast<int64_t>(sizeof(uint32_t));
  for_each_index(what.num_elems, [=](int64_t i) {
    const float x = at(i);
    store(residual, i, is_finite(x) ? x : load<float>(residual, i));
  });
  for (int64_t i = 0; i < what.num_kept; ++i) {
    const bool sent = is_finite(load<float>(values, i));
    if (sent) store(residual, load<uint32_t>(indices, i), 0.0F);
  }
}

// Of two NaN a sum has the bits of one or the other, as the compiler likes, and what passes count has to be the same
// in each.
inline float with_one_nan(float x) {
  return magnitude_bits(x) > kInfinityBits ? float_of(kNanBits) : x;
}

inline void encode_topk(const ToEncode& what) {
  const auto* source = static_cast<const std::byte*>(what.source);
  const auto* residual = static_cast<const std::byte*>(what.residual);
  if (residual == nullptr) {
    encode_topk([=](int64_t i) { return load<float>(source, i); }, what);
  } else {
    const auto sum = [=](int64_t i) {
      return with_one_nan(load<float>(source, i) + load<float>(residual, i));
    };
    encode_topk(sum, what);
    keep_topk(sum, what);
  }
}

}  // namespace
}  // namespace psstore
