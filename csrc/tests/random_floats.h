// Reproducible values for the tests of what computes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace psstore {

using Floats = std::vector<float>;

inline Floats random_floats(size_t num_elems, uint32_t seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  Floats floats(num_elems);
  for (float& element : floats) element = normal(engine);
  return floats;
}

}  // namespace psstore
