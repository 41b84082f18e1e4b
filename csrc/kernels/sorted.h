// The gradient of one block where each element is sorted over the members of a decision, and what is left without the
// lowest and the highest is summed: a median or a trimmed mean.
//
//   members   rows                sorted                      left
//   w0*g0  ─► [ x00 x01 x02 … ]   [ lowest of each element ]  dropped
//   w1*g1  ─► [ x10 x11 x12 … ]   [ …                      ]  ─► sum ─► / divisor ─► * scale
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

// Rows of numbers, wherever they lie, become sorted rows of keys in `memory`, `count` long and one after the other, where
// they may lie already.
using Rows = std::span<const std::byte* const>;

// A register of each row at a time: every row is read once and written once.
template <class T, int64_t kRows>
void sort_in_registers(Rows rows, int64_t count, std::byte* memory) {
  const std::byte* from[kRows];
  std::copy_n(rows.begin(), kRows, from);
  for_each_index(count, [=](int64_t i) {
    SortKey<T> keys[kRows];
    for (int64_t k = 0; k < kRows; ++k) keys[k] = sort_key(load<T>(from[k], i));
    [&]<size_t... kPair>(std::index_sequence<kPair...>) {
      (exchange(keys[kExchanges<kRows>[kPair].first], keys[kExchanges<kRows>[kPair].second]), ...);
    }(std::make_index_sequence<kNumExchanges<kRows>>{});
    for (int64_t k = 0; k < kRows; ++k) store(memory, k * count + i, keys[k]);
  });
}

template <class T>
void sort_in_memory(Rows rows, int64_t count, std::byte* memory) {
  using Key = SortKey<T>;
  const auto num_rows = static_cast<int64_t>(rows.size());
  const int64_t row_bytes = count * static_cast<int64_t>(sizeof(Key));
  for (int64_t k = 0; k < num_rows; ++k) {
    std::byte* row = memory + k * row_bytes;
    for_each_index(count, [=, from = rows[static_cast<size_t>(k)]](int64_t i) {
      store(row, i, sort_key(load<T>(from, i)));
    });
  }
  for_each_exchange(num_rows, [=](int64_t lower, int64_t higher) {
    std::byte* low = memory + lower * row_bytes;
    std::byte* high = memory + higher * row_bytes;
    for_each_index(count, [=](int64_t i) {
      Key one = load<Key>(low, i);
      Key other = load<Key>(high, i);
      exchange(one, other);
      store(low, i, one);
      store(high, i, other);
    });
  });
}

template <class T>
void sort_rows(Rows rows, int64_t count, std::byte* memory) {
  switch (rows.size()) {
    case 1: return sort_in_registers<T, 1>(rows, count, memory);
    case 2: return sort_in_registers<T, 2>(rows, count, memory);
    case 3: return sort_in_registers<T, 3>(rows, count, memory);
    case 4: return sort_in_registers<T, 4>(rows, count, memory);
    case 5: return sort_in_registers<T, 5>(rows, count, memory);
    case 6: return sort_in_registers<T, 6>(rows, count, memory);
    case 7: return sort_in_registers<T, 7>(rows, count, memory);
    case 8: return sort_in_registers<T, 8>(rows, count, memory);
    default: return sort_in_memory<T>(rows, count, memory);
  }
}

template <class T>
constexpr DType kOwnDType = sizeof(T) == sizeof(float) ? DType::kFloat32 : DType::kFloat64;

// w*g of contribution `k`, where it lies or at `memory`: added to nothing by what adds one, which reads every encoding.
template <class Sums, class T>
const std::byte* row_of(const SliceUpdate& update, size_t k, int64_t begin, int64_t count,
                        std::byte* memory, std::span<int64_t> entries) {
  const Contribution& one = update.contributions[k];
  if (one.dtype == kOwnDType<T> && one.weight == 1.0F) {
    return static_cast<const std::byte*>(one.data) + begin * static_cast<int64_t>(sizeof(T));
  }
  BlockSum<T> sum{kNothing<T>.data(), reinterpret_cast<T*>(memory), begin, count};
  if (k < entries.size()) sum.entries = entries.subspan(k, 1);
  Sums::add(sum, update.contributions.subspan(k, 1), update.num_elems);
  return memory;
}

// REQUIRES: count <= sorted_block_elems() of the members. `entries`: as reduce_block() has it.
template <class Sums, class T>
[[gnu::noinline]] void reduce_sorted(const SliceUpdate& update, double scale, int64_t begin,
                                     int64_t count, T* gradient, std::span<int64_t> entries) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(T));
  static constexpr T kZeros[kBlockElems] = {};
  alignas(64) std::byte memory[kLargestSortedElems * kBytes];
  const std::byte* rows[kMaxSorted];
  size_t num_rows = 0;
  for (; num_rows < update.contributions.size(); ++num_rows) {
    std::byte* own = memory + static_cast<int64_t>(num_rows) * count * kBytes;
    rows[num_rows] = row_of<Sums, T>(update, num_rows, begin, count, own, entries);
  }
  for (uint32_t zeros = 0; zeros < update.sorted->num_zeros; ++zeros) {
    rows[num_rows++] = reinterpret_cast<const std::byte*>(kZeros);
  }
  sort_rows<T>({rows, num_rows}, count, memory);

  const auto num_dropped = static_cast<int64_t>(update.sorted->num_dropped);
  const std::byte* row = memory + num_dropped * count * kBytes;
  for_each_index(count,
                 [=](int64_t i) { gradient[i] = number_of_key<T>(load<SortKey<T>>(row, i)); });
  for (int64_t left = static_cast<int64_t>(num_rows) - 2 * num_dropped; left > 1; --left) {
    row += count * kBytes;
    for_each_index(count,
                   [=](int64_t i) { gradient[i] += number_of_key<T>(load<SortKey<T>>(row, i)); });
  }
  const T divisor = static_cast<T>(update.divisor);
  const T factor = static_cast<T>(scale);
  for_each_index(count, [=](int64_t i) { gradient[i] = gradient[i] / divisor * factor; });
}

}  // namespace
}  // namespace psstore
