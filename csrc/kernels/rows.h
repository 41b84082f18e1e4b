// The pass over rows of a table: reduce each one's contributions as a slice's are (update.h), and apply a rule of rows.
//
// Contract: that of update.h. All instruction sets give the same bytes. The arithmetic of an element is in rules/sparse.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/update.h"

namespace psstore {

// So that a row's gradient fits the first-level cache.
inline constexpr uint32_t kMaxRowDim = 4096;

struct RowToStep {
  std::byte* value;  // (dim,) of the update's dtype, then its state in float32
  std::span<const Contribution> contributions;  // in rank order, each of dim elements
  uint64_t id = 0;                              // read where values are rounded by lot
};

// What bfloat16 values are rounded by, beside a row's id (row_values.h).
struct RoundingLots {
  uint64_t key = 0;       // lots_key() of the table's seed
  uint64_t decision = 0;  // its number
};

// Other lots than those that draw first values, which have the seed itself as their key.
constexpr uint64_t lots_key(uint64_t seed) {
  return seed ^ 0xB5297A4D3F84D5B5;  // any constant
}

struct RowsUpdate {
  RuleKind rule = RuleKind::kSparseSgd;
  const Hyper* hyper = nullptr;
  int64_t step = 1;  // number of this step for the table
  uint32_t dim = 1;  // at most kMaxRowDim
  double divisor = 1.0;
  double scale = 1.0;
  DType dtype = DType::kFloat32;  // of values: kFloat32, or kBFloat16, which are rounded by lot
  RoundingLots lots = {};         // read of kBFloat16
};

// Elements of float32 that a row of the rule has beside its value.
constexpr uint32_t row_state_elems(RuleKind rule, uint32_t dim) {
  switch (rule) {
    case RuleKind::kSparseAdagrad: return dim;
    case RuleKind::kRowwiseAdagrad: return 1;
    case RuleKind::kSparseAdam: return 2 * dim;
    case RuleKind::kSparseMomentum: return dim;
    case RuleKind::kFtrl: return 2 * dim;
    default: return 0;
  }
}

// Of these, the first that are sums of squares: they begin as the hyper-parameters say, and the others with zeros.
constexpr uint32_t row_sum_elems(RuleKind rule, uint32_t dim) {
  switch (rule) {
    case RuleKind::kSparseAdagrad:
    case RuleKind::kFtrl: return dim;
    case RuleKind::kRowwiseAdagrad: return 1;
    default: return 0;
  }
}

// What a new row's sums of squares are.
inline float initial_row_sum(const Hyper& hyper) {
  return static_cast<float>(hyper.initial_accumulator_value);
}

// What those of an assigned row are until its next step, which has them begin with initial_row_sum(): no sum of squares is
// negative, and a plain write knows no hyper-parameters.
inline constexpr float kSumToCome = -1.0F;

// Does not fail. REQUIRES: is_of_rows(update.rule); no row is there twice.
void step_rows(const RowsUpdate& update, std::span<const RowToStep> rows);

}  // namespace psstore
