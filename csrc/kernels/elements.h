// Elements in memory of any alignment, and loops over them that a compiler may vectorise.
//
// Included only by loops.h: see there why everything is in an unnamed namespace.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/half.h"
#include "kernels/update.h"

namespace psstore {
namespace {

// What is summed before the rule is applied to it. So short that the processor, which looks some hundred
// instructions ahead, begins with the memory of one while it still computes with the other: a few cache lines
// where that takes one pass and memory is what it waits for, and enough to be worth their overhead elsewhere.
constexpr int64_t kBlockElems = 512;
constexpr int64_t kShortBlockElems = 64;
constexpr int64_t kShortestBlockElems = 32;  // of eight float32: the bytes of four in 64

// A loop with arithmetic in it keeps too few loads in flight to be as fast as memory by itself, and the
// processor's own prefetching begins anew at every page of every stream. Past the end it is no access.
//
// Measured from memory with AVX-512 on Zen 5, as a share of the speed of a loop that only adds (docs/performance.md):
// SGD and Adam with four gradients 0.73 and 0.71 in blocks of 512 elements, fetched 1 KiB ahead; 0.96 and 1.00 in
// blocks of 64, and 1.04 and 1.00 with those 2 KiB ahead. With eight 0.83 and 0.88 in blocks of 64,
// 0.94 and 1.00 in blocks of 32.
constexpr int64_t kCacheLineBytes = 64;

template <class T>
[[gnu::always_inline]] inline T load(const std::byte* data, int64_t index) {
  T element;
  std::memcpy(&element, data + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return element;
}

template <class T>
[[gnu::always_inline]] inline void store(std::byte* data, int64_t index, T element) {
  std::memcpy(data + index * static_cast<int64_t>(sizeof(T)), &element, sizeof(T));
}

// To the number type that is computed in: exact, but for double to float.
template <class To>
PSSTORE_HD To number(float element) {
  return static_cast<To>(element);
}
template <class To>
PSSTORE_HD To number(double element) {
  return static_cast<To>(element);
}
template <class To>
PSSTORE_HD To number(BFloat16 element) {
  return static_cast<To>(to_float(element));
}
template <class To>
PSSTORE_HD To number(Float16 element) {
  return static_cast<To>(to_float(element));
}

// Calls `body(i)` for i in [0, count). No iteration reads what another writes: a kernel's ranges are the
// same or do not overlap, and element i depends on elements i alone.
template <class Body>
[[gnu::always_inline]] inline void for_each_index(int64_t count, Body body) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) body(i);
}

// The same for arrays of `Element` that are read from memory, a cache line of each at a time, which is
// fetched ahead. The fetching is no function of its own: GCC 12 takes one that does nothing else for one
// without effect, and drops its calls.
template <class Element, size_t kStreams, class Body>
[[gnu::always_inline]] inline void for_each_streamed(int64_t count,
                                                     const std::byte* const (&streams)[kStreams],
                                                     Body body) {
  constexpr int64_t kBytes = sizeof(Element);
  constexpr int64_t kLineElems = kCacheLineBytes / kBytes;
  int64_t begin = 0;
  for (; begin + kLineElems <= count; begin += kLineElems) {
    for (const std::byte* stream : streams) {
      __builtin_prefetch(stream + begin * kBytes + kFetchedAheadBytes);
    }
#pragma omp simd
    for (int64_t i = begin; i < begin + kLineElems; ++i) body(i);
  }
  for_each_index(count - begin, [=](int64_t i) { body(begin + i); });
}

template <class T>
void fill(std::byte* data, int64_t count, T element) {
  for_each_index(count, [=](int64_t i) { store(data, i, element); });
}

}  // namespace
}  // namespace psstore
