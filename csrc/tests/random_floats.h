// Reproducible values for the tests of what computes, and whether many are the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <span>
#include <vector>

namespace psstore {

using Floats = std::vector<float>;

// A seed's numbers are made once: sanitized and not optimised, each takes a microsecond.
inline Floats random_floats(size_t num_elems, uint32_t seed) {
  thread_local std::map<uint32_t, Floats> made;
  Floats& floats = made[seed];
  if (floats.size() < num_elems) {
    std::mt19937 engine(seed);
    std::normal_distribution<float> normal;
    floats.resize(num_elems);
    for (float& element : floats) element = normal(engine);
  }
  return {floats.begin(), floats.begin() + static_cast<std::ptrdiff_t>(num_elems)};
}

// As one call, which a sanitizer looks at once, not once for each element: what equals itself, shifted by one element,
// has equal elements.
template <typename T>
bool all_equal(std::span<const T> values, T value) {
  if (values.empty()) return true;
  return values[0] == value &&
         std::memcmp(values.data(), values.data() + 1, (values.size() - 1) * sizeof(T)) == 0;
}

}  // namespace psstore
