// What a row is before anybody has changed it: a pure function of its table and its id.
//
// So reading creates nothing, and a table has the same rows on any number of shards and in every life. The same bytes on
// every machine: a counter-based generator, and arithmetic without functions that libraries round as they like.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/types.h"

namespace psstore {

enum class FirstValueKind : uint8_t {
  kConstant = 1,  // a
  kUniform = 2,   // in (a, b)
  kNormal = 3,    // mean a, standard deviation b
};

struct FirstValues {
  FirstValueKind kind = FirstValueKind::kConstant;
  double a = 0;
  double b = 0;
  uint64_t seed = 0;  // of the table

  bool operator==(const FirstValues&) const = default;
};

// Writes `dim` float32, or these rounded to the nearest bfloat16, at any alignment.
void write_first_values(const FirstValues& of, uint64_t id, size_t dim, DType dtype,
                        std::byte* row);

// The standard normal distribution's quantile, of p in (0, 1), to about 1 part in 10^7.
// Source: Wichura, algorithm AS 241, Applied Statistics 37 (1988), PPND7.
double normal_quantile(double p);

}  // namespace psstore
