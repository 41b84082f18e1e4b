// What a shard knows of a tensor before it has a byte of it, and which writes fit that.
//
// Definitions come from the coordinator through clients; everything is checked here, before memory is
// allocated for it. Plain values: no locks, no buffers.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/types.h"
#include "kernels/rows.h"
#include "rows/row_bounds.h"
#include "rows/row_store.h"

namespace psstore {

// What the rows of a table are, beside its rule.
struct RowsSpec {
  uint32_t dim = 0;  // 0: it is no table
  FirstValues first_values;
  RowBounds bounds = {};

  bool operator==(const RowsSpec&) const = default;
};

// What a partition keeps of each row.
constexpr RowShape row_shape_of(RuleKind rule, uint32_t dim, DType dtype, bool evicts) {
  return {dim, row_state_elems(rule, dim), row_sum_elems(rule, dim), evicts, dtype};
}

// What values of rows may be kept in; their state is float32.
constexpr bool is_dtype_of_rows(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBFloat16;
}

// The immutable part of a slot.
struct SlotSpec {
  Key key = 0;
  uint64_t num_elems = 0;
  DType dtype = DType::kFloat32;  // of value and state: kFloat32 or kFloat64; of rows, of values
  RuleKind rule = RuleKind::kAssign;
  uint32_t group = 0;  // whose hyper-parameters it takes
  RowsSpec rows = {};  // of a partition of a table, which has no elements of its own
  Reduction reduction = {};
  // How far contributions are made up for what has become of the value since their workers were sent it; 0: not at all.
  double compensation = 0;

  bool has_rows() const { return is_of_rows(rule); }
  RowShape row_shape() const { return row_shape_of(rule, rows.dim, dtype, rows.bounds.evicts()); }
  size_t num_bytes() const { return num_elems * dtype_bytes(dtype); }
};

struct SliceSpec {
  Key key = 0;
  uint64_t num_elems = 0;

  bool operator==(const SliceSpec&) const = default;
};

// A tensor as this shard has to know it: with the slices that live here, and no others.
struct TensorDefinition {
  uint64_t tensor_id = 0;
  DType dtype = DType::kFloat32;
  RuleKind rule = RuleKind::kAssign;
  uint32_t group = 0;
  bool zeros = true;  // zero from the start; else without value until someone initialises it
  std::vector<SliceSpec> slices;  // of a table its partitions
  RowsSpec rows = {};
  Reduction reduction = {};
  double compensation = 0;

  bool operator==(const TensorDefinition&) const = default;

  // Throws Error(BAD_ARGUMENT) that names the field.
  void check() const;
  SlotSpec slot(const SliceSpec& slice) const;
};

// What the payload of a frame is for.
enum class WriteKind : uint8_t {
  kPush,     // contributions to a round
  kInit,     // first values
  kAssign,   // new values
  kAdd,      // to be added to the values
  kRestore,  // values and rule state, as they once were
};

// A slice travels in its own dtype; float32 also in either half precision.
constexpr bool travels_as(DType master, DType encoding) {
  return encoding == master || (master == DType::kFloat32 &&
                                (encoding == DType::kBFloat16 || encoding == DType::kFloat16));
}

// Contributions to a float32 slice and what is added to it may also be encoded.
constexpr bool writes_as(DType master, WriteKind kind, DType encoding) {
  if (!is_encoding(encoding)) return travels_as(master, encoding);
  return master == DType::kFloat32 && (kind == WriteKind::kPush || kind == WriteKind::kAdd);
}

// What a slice of that dtype can be followed by: its changes, encoded (table/published.h).
constexpr bool follows_as(DType master, DType encoding) {
  return master == DType::kFloat32 && (encoding == DType::kInt8 || encoding == DType::kSign);
}

// Whether `entry` may be read of that slot, which has no rows: OK, RULE_MISMATCH or DTYPE_MISMATCH.
ErrorCode check_read(const SlotSpec& spec, const SliceEntry& entry);

// Whether `entry` may be written to that slot: OK, RULE_MISMATCH, DTYPE_MISMATCH, SIZE_MISMATCH, or
// BAD_ARGUMENT for a number of steps that no slot can have taken.
ErrorCode check_write(const SlotSpec& spec, WriteKind kind, const SliceEntry& entry);

}  // namespace psstore
