// The hyper-parameters of an update rule, checked, and the state buffers that they ask for.
//
// Names and defaults are torch.optim's, or those of whoever has the rule (python/psstore/hyper.py lists them per rule);
// ranges are those that their constructors enforce. Nothing here knows about slices or memory.
#pragma once

#include <array>
#include <map>
#include <string>

#include "core/types.h"

namespace psstore {

// Every hyper-parameter of every rule; a rule reads only its own. Kept in double, as Python has them:
// each rule derives its scalars in double and rounds them once to the tensor's dtype, as torch does.
struct Hyper {
  double lr = 0;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  double beta1 = 0;
  double beta2 = 0;
  double eps = 0;
  double lr_decay = 0;
  double initial_accumulator_value = 0;
  double alpha = 0;
  double lr_power = 0;
  double l1 = 0;
  double l2 = 0;
  double l2_shrinkage = 0;
  double beta = 0;
  double every = 1;
  double activation = 0;
  bool nesterov = false;
  bool maximize = false;
  bool amsgrad = false;
  bool centered = false;
};

// All of the rule's names must be given and no other. Throws Error(BAD_HYPER) for a name that is
// unknown or missing, and for a value that is not finite or out of the range torch's constructor allows.
Hyper parse_hyper(RuleKind rule, const std::map<std::string, double>& given);

// Throws Error(BAD_HYPER) for a value that is infinite in the arithmetic of a tensor of this dtype: double
// for float64, float for every other. As torch does, whose operators take no such scalar.
void check_fits(RuleKind rule, const std::map<std::string, double>& given, DType dtype);

inline constexpr int kMaxStates = 3;

// The state buffers that a rule keeps, each of the tensor's dtype and size, under torch's names.
// A slot of the array always means the same buffer for one rule; a nullptr name is a slot that these
// hyper-parameters do not use (rmsprop: centered without momentum has no momentum_buffer).
//
//   rule              slot 0           slot 1           slot 2
//   sgd               momentum_buffer
//   adam, adamw       exp_avg          exp_avg_sq       max_exp_avg_sq
//   adagrad           sum
//   rmsprop           square_avg       momentum_buffer  grad_avg
//   reduce
//   delayed_nesterov  momentum_buffer  gradient_sum
//
// The rules of rows keep their state beside each row, and no buffers: see row_state_elems() of kernels/rows.h.
struct StateLayout {
  std::array<const char*, kMaxStates> names{};

  bool uses(int slot) const { return names[static_cast<size_t>(slot)] != nullptr; }
};

// May grow from one step to the next, when a schedule turns momentum on: the buffer is then new.
StateLayout state_layout(RuleKind rule, const Hyper& hyper);

// With every buffer that the rule uses under some hyper-parameters.
StateLayout largest_state_layout(RuleKind rule);

}  // namespace psstore
