// topk: which elements are kept.
//
// The elements pass by twice: once to find a magnitude that only a few more than k of them reach, and once to list
// those. What else it takes to keep the k largest is a matter of the list.
//
// Included only by codec_encode.h: see loops.h for why everything is in an unnamed namespace.
#pragma once

#include <algorithm>
#include <array>
#include <bit>

#include "kernels/codec_elements.h"
#include "kernels/codec_feedback.h"

namespace psstore {
namespace {

// Elements in memory as they are.
struct FloatsAt {
  const void* floats;

  [[gnu::always_inline]] float operator()(int64_t i) const { return load_at<float>(floats, i); }
};

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

// The highest digit that, with those above, was counted `k` times at least; `k` becomes how many of the digit
// itself these are. REQUIRES: that many were counted.
template <size_t kDigits>
uint32_t digit_of(const std::array<uint32_t, kDigits>& counts, uint32_t highest, int64_t& k) {
  uint32_t digit = highest;
  for (; digit > 0 && counts[digit] < k; --digit) k -= counts[digit];
  return digit;
}

// ---- a low magnitude ------------------------------------------------------------------------------

// Counts groups of elements by the largest magnitude in each. What the k-th of these is, k elements reach; and few
// others do, where a group has fewer elements than there are to one that is kept. A group is every kGroups-th element
// of a run, so that no register is looked at across.
class GroupCounts {
 public:
  static constexpr int64_t kGroups = 16;
  static constexpr int64_t kRunElems = 32 * kGroups;
  using Largest = std::array<int32_t, kGroups>;

  // Of `count` elements from `begin` on, which are a run, or fewer.
  template <class Feedback>
  [[gnu::always_inline]] static Largest largest_of(const Feedback& feedback, int64_t begin,
                                                   int64_t count) {
    Largest largest{};
    const auto look_at = [&](int64_t row, int64_t num_groups) {
      for_each_index(num_groups, [&](int64_t group) {
        const float x = feedback.template meant<float>(begin + row + group);
        const auto magnitude = static_cast<int32_t>(magnitude_bits(x));
        int32_t& so_far = largest[static_cast<size_t>(group)];
        so_far = magnitude > so_far ? magnitude : so_far;
      });
    };
    int64_t row = 0;
    for (; row + kGroups <= count; row += kGroups) {
      feedback.fetch_ahead(begin + row);
      look_at(row, kGroups);
    }
    look_at(row, count - row);
    return largest;
  }

  void add(const Largest& largest) {
    for (const int32_t one : largest) ++counts_[static_cast<uint32_t>(one) >> kShift];
    for (size_t group = 0; group < kGroups; ++group) {
      largest_[group] = std::max(largest_[group], largest[group]);
    }
    num_groups_ += kGroups;
  }

  // A magnitude that k elements reach; 0 where there are fewer groups.
  uint32_t low_magnitude(int64_t k) const {
    if (num_groups_ < k) return 0;
    const auto highest = static_cast<uint32_t>(*std::max_element(largest_.begin(), largest_.end()));
    return digit_of(counts_, highest >> kShift, k) << kShift;
  }

 private:
  // The exponent and five bits: no more than 3 % below.
  static constexpr int kShift = 18;
  std::array<uint32_t, 1U << (31 - kShift)> counts_{};
  Largest largest_{};
  int64_t num_groups_ = 0;
};

// ---- the k largest --------------------------------------------------------------------------------

// The k-th largest magnitude, digit by digit from the highest on: each pass counts the elements that share
// the digits found so far by their next one, so that no memory is needed and no order of the elements
// matters. `at(i)` is element i. REQUIRES: 1 <= k <= num_elems; that k elements reach `low`.
template <class At>
Cut find_cut(At at, int64_t num_elems, int64_t k, uint32_t low) {
  std::array<uint32_t, 1 << kDigitBits[0]> counts;
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

constexpr int64_t kTooMany = -1;

// The indices, ascending, of the elements that reach `low`: how many, or kTooMany.
template <class Encoders, class At>
int64_t list_reaching(At at, int64_t num_elems, uint32_t low, std::byte* indices, int64_t room) {
  int64_t num_listed = 0;
  const auto list = [&](int64_t begin, uint32_t reaching) {
    for (; reaching != 0; reaching &= reaching - 1) {
      if (num_listed == room) return false;
      store(indices, num_listed, static_cast<uint32_t>(begin + std::countr_zero(reaching)));
      ++num_listed;
    }
    return true;
  };
  int64_t begin = 0;
  for (; begin + kChunk <= num_elems; begin += kChunk) {
    if (!list(begin, Encoders::reaching(at, begin, low))) return kTooMany;
  }
  const auto reaches = [=](uint32_t magnitude) { return magnitude >= low; };
  return list(begin, passing(at, begin, num_elems - begin, reaches)) ? num_listed : kTooMany;
}

// The two halves of a payload.
struct Entries {
  std::byte* indices;
  std::byte* values;

  explicit Entries(const ToEncode& what)
      : indices(static_cast<std::byte*>(what.payload)),
        values(indices + what.num_kept * int64_t{sizeof(uint32_t)}) {}
};

// The k largest of some candidates, of which `index_of` says which elements they are, in ascending order, and how
// many these were. The candidates may be listed where the payload will be: what is written is not ahead of them.
template <class At, class IndexOf>
int64_t keep_largest(At at, IndexOf index_of, int64_t num_candidates, uint32_t low,
                     const ToEncode& what) {
  const Entries entries(what);
  const auto candidate = [=](int64_t c) { return at(index_of(c)); };
  Cut cut = find_cut(candidate, num_candidates, what.num_kept, low);
  int64_t num_kept = 0;
  visit_few(
      candidate, num_candidates, [=](uint32_t magnitude) { return magnitude >= cut.magnitude; },
      [&](int64_t c, float x) {
        if (magnitude_bits(x) == cut.magnitude && cut.num_equal-- <= 0) return;
        if (num_kept == what.num_kept) return;  // somebody changes the elements meanwhile
        store(entries.indices, num_kept++, static_cast<uint32_t>(index_of(c)));
      });
  for (int64_t i = 0; i < num_kept; ++i) {
    store(entries.values, i, at(load<uint32_t>(entries.indices, i)));
  }
  return num_kept;
}

// `at(i)` is what is to be encoded of element i. Returns the number of entries.
template <class Encoders, class At>
int64_t encode_topk(At at, uint32_t low, const ToEncode& what) {
  if (what.num_kept == 0) return 0;
  const Entries entries(what);
  const int64_t num_listed =
      list_reaching<Encoders>(at, what.num_elems, low, entries.indices, 2 * what.num_kept);
  if (num_listed == kTooMany) {
    return keep_largest(at, [](int64_t i) { return i; }, what.num_elems, low, what);
  }
  const auto listed = [=](int64_t c) { return int64_t{load<uint32_t>(entries.indices, c)}; };
  return keep_largest(at, listed, num_listed, low, what);
}

// ---- with a residual ------------------------------------------------------------------------------

// The source is added to the residual, run by run up to one with a sum that is not finite, for which the residual
// has to stay as it is. Returns how many elements were added.
inline int64_t add_to_residual(const ResidualFeedback& feedback, int64_t num_elems,
                               GroupCounts& groups) {
  constexpr int64_t kRun = GroupCounts::kRunElems;
  for (int64_t begin = 0; begin < num_elems; begin += kRun) {
    const int64_t count = std::min(kRun, num_elems - begin);
    const auto largest = count == kRun ? GroupCounts::largest_of(feedback, begin, kRun)
                                       : GroupCounts::largest_of(feedback, begin, count);
    const int32_t largest_of_all = *std::max_element(largest.begin(), largest.end());
    if (largest_of_all >= static_cast<int32_t>(kInfinityBits)) return begin;
    if (count == kRun) groups.add(largest);
    for_each_index(count, [=](int64_t i) {
      store_at(feedback.residual, begin + i, feedback.meant<float>(begin + i));
    });
  }
  return num_elems;
}

// Of two NaN a sum has the bits of one or the other, as the compiler likes, and what passes count has to be the same
// in each.
inline float with_one_nan(float x) {
  return magnitude_bits(x) > kInfinityBits ? float_of(kNanBits) : x;
}

template <class Encoders>
void encode_topk(const ResidualFeedback& feedback, const ToEncode& what) {
  GroupCounts groups;
  const int64_t num_added = add_to_residual(feedback, what.num_elems, groups);
  const uint32_t low = groups.low_magnitude(what.num_kept);
  int64_t num_kept = 0;
  const FloatsAt added{feedback.residual};
  const auto sum = [=](int64_t i) {
    return i < num_added ? added(i) : with_one_nan(feedback.meant<float>(i));
  };
  if (num_added == what.num_elems) {
    num_kept = encode_topk<Encoders>(added, low, what);
  } else {
    num_kept = encode_topk<Encoders>(sum, low, what);
  }
  for_each_index(what.num_elems - num_added, [=](int64_t i) {
    const float x = sum(num_added + i);
    if (is_finite(x)) store_at(feedback.residual, num_added + i, x);
  });
  const Entries entries(what);
  for (int64_t i = 0; i < num_kept; ++i) {
    const bool sent = is_finite(load<float>(entries.values, i));
    if (sent) store_at(feedback.residual, load<uint32_t>(entries.indices, i), 0.0F);
  }
}

template <class Encoders>
void encode_topk(const ToEncode& what) {
  if (what.residual != nullptr) {
    return encode_topk<Encoders>(ResidualFeedback{what.source, what.residual}, what);
  }
  constexpr int64_t kRun = GroupCounts::kRunElems;
  GroupCounts groups;
  for (int64_t begin = 0; begin + kRun <= what.num_elems; begin += kRun) {
    groups.add(GroupCounts::largest_of(NoFeedback{what.source}, begin, kRun));
  }
  const uint32_t low = groups.low_magnitude(what.num_kept);
  encode_topk<Encoders>(FloatsAt{what.source}, low, what);
}

}  // namespace
}  // namespace psstore
