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
  std::byte* value;                             // dim × float32, then its state
  std::span<const Contribution> contributions;  // in rank order: float32, each of dim elements
};

struct RowsUpdate {
  RuleKind rule = RuleKind::kSparseSgd;
  const Hyper* hyper = nullptr;
  int64_t step = 1;  // number of this step for the table
  uint32_t dim = 1;  // at most kMaxRowDim
  double divisor = 1.0;
  double scale = 1.0;
};

// Elements of float32 that a row of the rule has beside its value.
constexpr uint32_t row_state_elems(RuleKind rule, uint32_t dim) {
  switch (rule) {
    case RuleKind::kSparseAdagrad: return dim;
    case RuleKind::kRowwiseAdagrad: return 1;
    case RuleKind::kSparseAdam: return 2 * dim;
    default: return 0;
  }
}

// Whether a row's state is sums of squares, which begin as the hyper-parameters say; else it begins with zeros.
constexpr bool sums_squares(RuleKind rule) {
  return rule == RuleKind::kSparseAdagrad || rule == RuleKind::kRowwiseAdagrad;
}

// What a new row's state is.
inline float initial_row_state(RuleKind rule, const Hyper& hyper) {
  return sums_squares(rule) ? static_cast<float>(hyper.initial_accumulator_value) : 0.0F;
}

// What the state of an assigned row is until its next step, which has it begin with initial_row_state(): no sum of squares
// is negative, and a plain write knows no hyper-parameters.
inline constexpr float kStateToCome = -1.0F;
constexpr float assigned_row_state(RuleKind rule) {
  return sums_squares(rule) ? kStateToCome : 0.0F;
}

// Does not fail. REQUIRES: is_of_rows(update.rule); no row is there twice.
void step_rows(const RowsUpdate& update, std::span<const RowToStep> rows);

}  // namespace psstore
