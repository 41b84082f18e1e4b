#include "table/schema.h"

#include <cmath>
#include <limits>
#include <string>
#include <unordered_set>

#include "rows/contribution.h"
#include "rules/hyper.h"

namespace psstore {
namespace {

// A descriptor says a slice's bytes in 32 bits (SliceEntry::num_bytes).
constexpr uint64_t kMaxSliceBytes = std::numeric_limits<uint32_t>::max();

bool rule_allows(RuleKind rule, WriteKind kind) {
  switch (kind) {
    case WriteKind::kPush: return applies_by_decision(rule);
    case WriteKind::kInit: return true;
    case WriteKind::kAssign: return rule == RuleKind::kAssign;
    case WriteKind::kAdd: return rule == RuleKind::kAssign || rule == RuleKind::kAdd;
    case WriteKind::kRestore: return applies_by_decision(rule);
  }
  return false;
}

static_assert(kMaxPart == kMaxStates);

// Rules compute with the number of steps in float64, which holds every integer up to here.
constexpr uint64_t kMaxSteps = uint64_t{1} << 53;

// A state buffer is restored as it is stored, or as one that was never made.
ErrorCode check_state_write(const SlotSpec& spec, const SliceEntry& entry) {
  if (entry.part > kMaxPart || !largest_state_layout(spec.rule).uses(entry.part - 1)) {
    return ErrorCode::RULE_MISMATCH;
  }
  if (entry.version > kMaxSteps) return ErrorCode::BAD_ARGUMENT;
  if (entry.dtype != spec.dtype) return ErrorCode::DTYPE_MISMATCH;
  if (entry.num_bytes != 0 && entry.num_bytes != spec.num_bytes()) return ErrorCode::SIZE_MISMATCH;
  return ErrorCode::OK;
}

[[noreturn]] void refuse_tensor(uint64_t tensor_id, const std::string& what) {
  throw Error(ErrorCode::BAD_ARGUMENT, "tensor " + std::to_string(tensor_id) + ": " + what);
}

void check_bounds(uint64_t id, const RowBounds& bounds) {
  const bool is_known = bounds.eviction <= EvictionKind::kTimeToLive &&
                        bounds.admission <= AdmissionKind::kProbability;
  if (!is_known || bounds.max_rows > kMaxRows) {
    refuse_tensor(id, "its rows are bounded in no way that there is");
  }
  const bool has_time = 0 < bounds.time_to_live && bounds.time_to_live <= kMaxTimeToLive;
  if (bounds.eviction == EvictionKind::kTimeToLive ? !has_time
                                                   : bounds.evicts() && bounds.max_rows == 0) {
    refuse_tensor(id, "its rows are to be evicted, and nothing says when");
  }
  const bool is_after = 0 < bounds.admit_after && bounds.admit_after <= kMaxAdmitAfter;
  const bool is_lot = 0 < bounds.admit_probability && bounds.admit_probability <= 1;
  if ((bounds.admission == AdmissionKind::kAfter && !is_after) ||
      (bounds.admission == AdmissionKind::kProbability && !is_lot)) {
    refuse_tensor(id, "its rows are to be admitted after " + std::to_string(bounds.admit_after) +
                          " contributions, or with probability " +
                          std::to_string(bounds.admit_probability));
  }
}

void check_rows(const TensorDefinition& definition) {
  const uint64_t id = definition.tensor_id;
  const auto& [dim, first_values, bounds] = definition.rows;
  if (is_of_rows(definition.rule) != (dim != 0)) {
    refuse_tensor(id, "its rule is number " + std::to_string(static_cast<int>(definition.rule)) +
                          ", and its rows have " + std::to_string(dim) +
                          " elements; tables have a rule of rows, and nothing else has");
  }
  if (dim == 0) return;
  if (dim > kMaxRowDim || !is_dtype_of_rows(definition.dtype)) {
    refuse_tensor(id, "rows are of 1 to " + std::to_string(kMaxRowDim) +
                          " float32 or bfloat16, not of " + std::to_string(dim) +
                          " elements of dtype " +
                          std::to_string(static_cast<int>(definition.dtype)));
  }
  const bool is_known = FirstValueKind::kConstant <= first_values.kind &&
                        first_values.kind <= FirstValueKind::kNormal;
  if (!is_known || !std::isfinite(first_values.a) || !std::isfinite(first_values.b)) {
    refuse_tensor(id, "its first values are of no kind that there is, or not finite");
  }
  check_bounds(id, bounds);
}

void check_reduction(const TensorDefinition& definition) {
  const auto [kind, trim] = definition.reduction;
  const bool trims = kind == ReductionKind::kTrimmedMean;
  if (kind > kLastReduction || trims != (trim != 0)) {
    refuse_tensor(definition.tensor_id,
                  "there is no reduction " + std::to_string(static_cast<int>(kind)) +
                      " that drops " + std::to_string(trim) + " at either end");
  }
  const bool is_reduced = applies_by_decision(definition.rule) && !is_of_rows(definition.rule);
  if (definition.reduction.sorts() && !is_reduced) {
    refuse_tensor(
        definition.tensor_id,
        "only what is trained and no table can be sorted over workers, and its rule is number " +
            std::to_string(static_cast<int>(definition.rule)));
  }
}

void check_compensation(const TensorDefinition& definition) {
  const double compensation = definition.compensation;
  if (!(compensation >= 0) || !std::isfinite(compensation)) {
    refuse_tensor(definition.tensor_id, "its gradients can't be compensated by " +
                                            std::to_string(compensation) +
                                            "; expected a finite number from 0 on");
  }
  if (compensation != 0 && !compensates(definition.rule)) {
    refuse_tensor(definition.tensor_id,
                  "only what takes steps by its gradients, and is no table, can have them "
                  "compensated, and its rule is number " +
                      std::to_string(static_cast<int>(definition.rule)));
  }
}

// A partition takes contributions, and values of some of its rows, which travel likewise.
ErrorCode check_rows_write(const SlotSpec& spec, WriteKind kind, const SliceEntry& entry) {
  const bool is_taken = kind == WriteKind::kPush || kind == WriteKind::kAssign;
  if (!is_taken || entry.part != 0) return ErrorCode::RULE_MISMATCH;
  if (!is_rows_encoding(entry.dtype)) return ErrorCode::DTYPE_MISMATCH;
  const size_t row_bytes = contributed_row_bytes(spec.rows.dim, dtype_of_rows(entry.dtype));
  const bool are_whole = entry.num_bytes % row_bytes == 0;
  return are_whole ? ErrorCode::OK : ErrorCode::SIZE_MISMATCH;
}

}  // namespace

void TensorDefinition::check() const {
  const bool is_table = rows.dim != 0;
  if (!is_table && dtype != DType::kFloat32 && dtype != DType::kFloat64) {
    refuse_tensor(tensor_id, "dtype " + std::to_string(static_cast<int>(dtype)) +
                                 " can't be stored; a value is float32 or float64");
  }
  if (rule < RuleKind::kAssign || rule > kLastRule) {
    refuse_tensor(tensor_id, "there is no update rule " + std::to_string(static_cast<int>(rule)));
  }
  check_rows(*this);
  check_reduction(*this);
  check_compensation(*this);
  const uint64_t max_elems = kMaxSliceBytes / dtype_bytes(dtype);
  std::unordered_set<Key> keys;
  for (const SliceSpec& slice : slices) {
    if (tensor_of(slice.key) != tensor_id) {
      refuse_tensor(tensor_id, "key " + std::to_string(slice.key) + " is a slice of tensor " +
                                   std::to_string(tensor_of(slice.key)));
    }
    if (!keys.insert(slice.key).second) {
      refuse_tensor(tensor_id, "key " + std::to_string(slice.key) + " is there twice");
    }
    if (slice.num_elems > max_elems) {
      refuse_tensor(tensor_id, "key " + std::to_string(slice.key) + " has " +
                                   std::to_string(slice.num_elems) + " elements, at most " +
                                   std::to_string(max_elems) + " fit a slice");
    }
  }
}

SlotSpec TensorDefinition::slot(const SliceSpec& slice) const {
  return {slice.key, slice.num_elems, dtype, rule, group, rows, reduction, compensation};
}

ErrorCode check_read(const SlotSpec& spec, const SliceEntry& entry) {
  if (spec.has_rows()) return ErrorCode::RULE_MISMATCH;
  if (entry.part == 0 && follows_as(spec.dtype, entry.dtype)) {
    return applies_by_decision(spec.rule) ? ErrorCode::OK : ErrorCode::RULE_MISMATCH;
  }
  const bool travels = entry.part == 0 ? travels_as(spec.dtype, dtype_of_changes(entry.dtype))
                                       : entry.dtype == spec.dtype;
  return travels ? ErrorCode::OK : ErrorCode::DTYPE_MISMATCH;
}

ErrorCode check_write(const SlotSpec& spec, WriteKind kind, const SliceEntry& entry) {
  if (spec.has_rows()) return check_rows_write(spec, kind, entry);
  if (!rule_allows(spec.rule, kind)) return ErrorCode::RULE_MISMATCH;
  if (entry.part != 0) return check_state_write(spec, entry);
  if (!writes_as(spec.dtype, kind, entry.dtype)) return ErrorCode::DTYPE_MISMATCH;
  const bool fits = is_encoded_size(entry.dtype, spec.num_elems, entry.num_bytes);
  return fits ? ErrorCode::OK : ErrorCode::SIZE_MISMATCH;
}

}  // namespace psstore
