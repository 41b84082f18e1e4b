// The fused pass over one slice: reduce n weighted contributions in the order given, divide, and apply
// the update rule; every byte is read once and written once.
//
// Contract: pure functions of their arguments. They lock nothing, allocate nothing and may run on
// different slices at the same time. Pointers may have any alignment. All instruction sets give the same
// bytes (but for the payload of a NaN). The arithmetic of an element is in csrc/rules/.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>

#include "core/types.h"
#include "rules/hyper.h"

namespace psstore {

// One worker's gradient for the slice: `num_elems` elements of `dtype`, which may be an encoding; then it is
// well formed (codec.h).
struct Contribution {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  float weight = 1.0F;
  uint64_t num_bytes = 0;  // read of kTopK only: the others follow from the number of elements
};

// Whether a contribution in that encoding can be added to a tensor: when it widens without loss.
constexpr bool accepts_contribution(DType tensor, DType contribution) {
  return tensor == DType::kFloat64 ||
         (tensor == DType::kFloat32 && contribution != DType::kFloat64);
}

// In place of the weighted sum: each element by itself is sorted over the members of a decision, w*g of those who
// contribute and zeros of the others, in the total order of IEEE 754 (so a NaN is beyond the infinity of its sign),
// and without as many of the lowest and of the highest summed in ascending order.
struct Sorted {
  uint32_t num_zeros = 0;
  uint32_t num_dropped = 0;  // at either end
};

struct SliceUpdate {
  RuleKind rule = RuleKind::kAssign;
  const Hyper* hyper = nullptr;   // not read by assign and add; may then be null
  int64_t step = 1;               // number of this step for this slice: 1 for the first
  DType dtype = DType::kFloat32;  // of value and state: kFloat32 or kFloat64
  int64_t num_elems = 0;
  std::span<const Contribution> contributions;  // in rank order; none at all counts as zero
  double divisor = 1.0;                         // of the sum
  std::optional<Sorted> sorted = {};            // unset: the sum is of all, in rank order
  // Multiplies the reduced gradient after the division, with one rounding of its own; 1 leaves it
  // untouched bit for bit. Clipping sets it (docs/update_rules.md).
  double scale = 1.0;
  // The value that the gradient was taken at, (num_elems,) of `dtype`, and how far the gradient is made up for what has
  // become of the value since (rules/compensation.h); null: it is taken as it is.
  const void* base = nullptr;
  double compensation = 0;
  const void* value_in = nullptr;
  void* value_out = nullptr;  // value_in itself (in place), or memory that does not overlap it
  std::array<void*, kMaxStates> state{};  // by the slots of StateLayout; null where unused
  uint32_t state_is_new = 0;  // bit i: state[i] is uninitialised; it starts as torch's does
  void* shadow = nullptr;  // (num_elems,) bfloat16, or null: becomes value_out, as convert() rounds
};

// How far ahead of what it reads the pass has memory on its way. So the first bytes of a slice come late, unless
// whoever steps one slice after the other has begun with them.
inline constexpr int64_t kFetchedAheadBytes = 2048;

// g = (w0*g0 + w1*g1 + ...) / divisor * scale, each product, sum and quotient rounded once; then
// (value_out, state) = rule(value_in, state, g). With `sorted` the sum is what that says, with `base` g is compensated.
// REQUIRES: accepts_contribution() of each; state memory for each slot in state_layout(); of `sorted` at most
// kMaxSorted members, of whom some are left; with `base` a scale of 1, and a rule that takes a step by g.
// Throws Error(INTERNAL) before it writes anything if the caller broke that; else does not fail.
void reduce_update(const SliceUpdate& update);

// The sum of the squares of (w0*g0 + w1*g1 + ...) / divisor, that is of the gradient as reduce_update()
// has it before the scale, rounded to the tensor's dtype; squared and summed in float64. Not finite if
// one of the elements is not, or if the sum is too large for float64. Reads dtype, num_elems,
// contributions, divisor and sorted of `update` and nothing else.
// REQUIRES and throws: what reduce_update() does of these.
double reduced_squares(const SliceUpdate& update);

// `num_elems` elements of `from` at `source` to `to` at `destination`, rounded to nearest even as torch's
// Tensor.to does (float64 to a half precision goes through float32). The ranges must not overlap.
void convert(DType from, DType to, const void* source, void* destination, int64_t num_elems);

// Whether no element is NaN or an infinity.
bool all_finite(DType dtype, const void* data, int64_t num_elems);

}  // namespace psstore
