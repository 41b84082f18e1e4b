// The gradient of one block where each element is sorted over the members of a decision, and what is left without the
// lowest and the highest is summed: a median or a trimmed mean.
//
//   members   rows of keys        sorted, row by row          left
//   w0*g0  ─► [ k00 k01 k02 … ]   [ lowest of each element ]  dropped
//   w1*g1  ─► [ k10 k11 k12 … ]   [ …                      ]  ─► sum ─► / divisor ─► * scale
//   none   ─► [  0   0   0  … ]   [ highest                ]  dropped
//
// Rows are exchanged whole, as a sorting network has it: every comparison is a minimum and a maximum of two rows, which
// a compiler vectorises over elements, and none depends on a value. So what comes out, and how long it takes, are the
// same whatever the members send and whichever of them is which.
//
// Included only by reduce.h: see loops.h for why everything is in an unnamed namespace.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <span>
#include <type_traits>
#include <utility>

#include "kernels/elements.h"
#include "kernels/sums.h"
#include "kernels/update.h"

namespace psstore {
namespace {

// What the rows of a few members take of the first-level cache: 16 KiB of float32. With more members a block is
// shorter, down to where a row is a register or two of an instruction set.
constexpr int64_t kSortedElems = 4096;
constexpr int64_t kLargestSortedElems = int64_t{kMaxSorted} * kShortestBlockElems;
static_assert(std::has_single_bit(uint64_t{kSortedElems}),
              "a block lies within an encoded one, or has whole ones");

inline int64_t num_members(const SliceUpdate& update) {
  return static_cast<int64_t>(update.contributions.size()) + update.sorted->num_zeros;
}

// REQUIRES: 0 < num_members <= kMaxSorted.
inline int64_t sorted_block_elems(int64_t num_members) {
  const auto fitting =
      static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(kSortedElems / num_members)));
  return std::clamp(fitting, kShortestBlockElems, kBlockElems);
}

// An integer that compares as the number does in IEEE 754's total order: -NaN < -inf < ... < -0 < +0 < ... < inf < NaN.
// Of what is negative all bits but the sign are turned; turned again, they are the number's.
template <class T>
using SortKey = std::conditional_t<sizeof(T) == sizeof(int32_t), int32_t, int64_t>;

template <class Key>
[[gnu::always_inline]] inline Key turned(Key bits) {
  constexpr Key kAllButSign = std::numeric_limits<Key>::max();
  return bits ^ (bits >> (8 * sizeof(Key) - 1) & kAllButSign);
}

template <class T>
[[gnu::always_inline]] inline SortKey<T> sort_key(T number) {
  return turned(std::bit_cast<SortKey<T>>(number));
}

template <class T>
[[gnu::always_inline]] inline T number_of_key(SortKey<T> key) {
  return std::bit_cast<T>(turned(key));
}

// Calls `exchange(lower, higher)` for the pairs of rows that sort so many of them, in order: Batcher's merge exchange
// (Knuth, The Art of Computer Programming 3, 5.2.2, algorithm M).
template <class Exchange>
constexpr void for_each_exchange(int64_t num_rows, Exchange exchange) {
  if (num_rows < 2) return;
  const auto highest = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(num_rows - 1)));
  for (int64_t p = highest; p > 0; p /= 2) {
    int64_t r = 0;
    int64_t d = p;
    for (int64_t q = highest;; q /= 2) {
      for (int64_t i = 0; i + d < num_rows; ++i) {
        if ((i & p) == r) exchange(i, i + d);
      }
      if (q == p) break;
      d = q - p;
      r = p;
    }
  }
}

template <class Key>
[[gnu::always_inline]] inline void exchange(Key& lower, Key& higher) {
  const Key one = lower;
  const Key other = higher;
  lower = std::min(one, other);
  higher = std::max(one, other);
}

// Which they are of so many rows, known to the compiler.
template <int64_t kRows>
constexpr size_t kNumExchanges = [] {
  size_t count = 0;
  for_each_exchange(kRows, [&](int64_t, int64_t) { ++count; });
  return count;
}();

template <int64_t kRows>
constexpr auto kExchanges = [] {
  std::array<std::pair<int64_t, int64_t>, kNumExchanges<kRows>> pairs{};
  size_t count = 0;
  for_each_exchange(kRows,
                    [&](int64_t lower, int64_t higher) { pairs[count++] = {lower, higher}; });
  return pairs;
}();

// A register of each row at a time, so that rows are read and written once.
template <int64_t kRows, class Key>
void sort_in_registers(Key* rows, int64_t count) {
  for_each_index(count, [=](int64_t i) {
    Key keys[kRows];
    for (int64_t k = 0; k < kRows; ++k) keys[k] = rows[k * count + i];
    [&]<size_t... kPair>(std::index_sequence<kPair...>) {
      (exchange(keys[kExchanges<kRows>[kPair].first], keys[kExchanges<kRows>[kPair].second]), ...);
    }(std::make_index_sequence<kNumExchanges<kRows>>{});
    for (int64_t k = 0; k < kRows; ++k) rows[k * count + i] = keys[k];
  });
}

template <class Key>
void sort_in_memory(Key* rows, int64_t num_rows, int64_t count) {
  for_each_exchange(num_rows, [=](int64_t lower, int64_t higher) {
    Key* low = rows + lower * count;
    Key* high = rows + higher * count;
    for_each_index(count, [=](int64_t i) { exchange(low[i], high[i]); });
  });
}

// Rows that are `count` long and apart.
template <class Key>
void sort_rows(Key* rows, int64_t num_rows, int64_t count) {
  switch (num_rows) {
    case 1: return;
    case 2: return sort_in_registers<2>(rows, count);
    case 3: return sort_in_registers<3>(rows, count);
    case 4: return sort_in_registers<4>(rows, count);
    case 5: return sort_in_registers<5>(rows, count);
    case 6: return sort_in_registers<6>(rows, count);
    case 7: return sort_in_registers<7>(rows, count);
    case 8: return sort_in_registers<8>(rows, count);
    default: return sort_in_memory(rows, num_rows, count);
  }
}

// One row for each contribution, w*g: added to nothing by what adds one, which reads every encoding.
template <class Sums, class T>
void load_rows(const SliceUpdate& update, int64_t begin, int64_t count, SortKey<T>* rows,
               std::span<int64_t> entries) {
  alignas(64) T product[kBlockElems];
  for (size_t k = 0; k < update.contributions.size(); ++k) {
    BlockSum<T> sum{kNothing<T>.data(), product, begin, count};
    if (k < entries.size()) sum.entries = entries.subspan(k, 1);
    Sums::add(sum, update.contributions.subspan(k, 1), update.num_elems);
    SortKey<T>* row = rows + static_cast<int64_t>(k) * count;
    for_each_index(count, [=, from = product](int64_t i) { row[i] = sort_key<T>(from[i]); });
  }
}

// REQUIRES: count <= sorted_block_elems() of the members. `entries`: as reduce_block() has it.
template <class Sums, class T>
[[gnu::noinline]] void reduce_sorted(const SliceUpdate& update, double scale, int64_t begin,
                                     int64_t count, T* gradient, std::span<int64_t> entries) {
  alignas(64) SortKey<T> rows[kLargestSortedElems];
  const auto [num_zeros, num_dropped] = *update.sorted;
  load_rows<Sums, T>(update, begin, count, rows, entries);
  const int64_t all = num_members(update);
  std::fill_n(rows + (all - num_zeros) * count, num_zeros * count, sort_key<T>(T(0)));
  sort_rows(rows, all, count);

  const SortKey<T>* row = rows + num_dropped * count;
  for_each_index(count, [=](int64_t i) { gradient[i] = number_of_key<T>(row[i]); });
  for (int64_t k = num_dropped + 1; k < all - num_dropped; ++k) {
    row += count;
    for_each_index(count, [=](int64_t i) { gradient[i] += number_of_key<T>(row[i]); });
  }
  const T divisor = static_cast<T>(update.divisor);
  const T factor = static_cast<T>(scale);
  for_each_index(count, [=](int64_t i) { gradient[i] = gradient[i] / divisor * factor; });
}

}  // namespace
}  // namespace psstore
