// Elements in memory of any alignment, and loops over them that a compiler may vectorise.
//
// Included only by loops.h: see there why everything is in an unnamed namespace.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/half.h"

namespace psstore {
namespace {

// Two blocks of a slice (the reduced gradient, and what a rule streams past it) stay in a 32 KiB L1.
constexpr int64_t kBlockElems = 2048;

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
[[gnu::always_inline]] inline To number(float element) {
  return static_cast<To>(element);
}
template <class To>
[[gnu::always_inline]] inline To number(double element) {
  return static_cast<To>(element);
}
template <class To>
[[gnu::always_inline]] inline To number(BFloat16 element) {
  return static_cast<To>(to_float(element));
}
template <class To>
[[gnu::always_inline]] inline To number(Float16 element) {
  return static_cast<To>(to_float(element));
}

// Calls `body(i)` for i in [0, count). No iteration reads what another writes: a kernel's ranges are the
// same or do not overlap, and element i depends on elements i alone.
template <class Body>
[[gnu::always_inline]] inline void for_each_index(int64_t count, Body body) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) body(i);
}

template <class T>
void fill(std::byte* data, int64_t count, T element) {
  for_each_index(count, [=](int64_t i) { store(data, i, element); });
}

}  // namespace
}  // namespace psstore
