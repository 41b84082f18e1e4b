// The forms of a step, one for each set of state buffers and way through a rule: what a loop over elements
// is compiled for, on the CPU and on a GPU. Which of them an update takes is decided here, once per slice.
#pragma once

#include <cstdint>
#include <utility>

#include "core/instruction_set.h"
#include "kernels/update.h"
#include "rules/adagrad.h"
#include "rules/adam.h"
#include "rules/delayed_nesterov.h"
#include "rules/rmsprop.h"
#include "rules/sgd.h"

namespace psstore {
inline namespace PSSTORE_INSTRUCTION_SET {

enum class StepForm : uint8_t {
  kAssign,
  kAdd,
  kSgd,
  kSgdFirstMomentum,
  kSgdMomentum,
  kAdam,
  kAmsgrad,
  kAdagrad,
  kRmsProp,
  kRmsPropMomentum,
  kRmsPropCentered,
  kRmsPropCenteredMomentum,
  kDelayedNesterov,
  kDelayedNesterovMomentum,
};
inline constexpr int kNumStepForms = 14;

// The slots of StateLayout whose buffers a form steps, in the order of its arguments.
template <int... kSlots>
using Slots = std::integer_sequence<int, kSlots...>;

// A form: called with (value, gradient, a reference to each state) it gives the new value. `make` derives its
// scalars from the hyper-parameters, on the host, once for a slice.
template <class T, StepForm form, int... kSlots>
struct StepOf {
  using Element = T;
  using States = Slots<kSlots...>;
  static constexpr StepForm kForm = form;

  PSSTORE_HD T initial() const { return T(0); }  // content of a state buffer that is new
};

template <class T>
struct AssignStep : StepOf<T, StepForm::kAssign> {
  static AssignStep make(const SliceUpdate&) { return {}; }
  PSSTORE_HD T operator()(T, T grad) const { return grad; }
};

template <class T>
struct AddStep : StepOf<T, StepForm::kAdd> {
  static AddStep make(const SliceUpdate&) { return {}; }
  PSSTORE_HD T operator()(T value, T grad) const { return value + grad; }
};

template <class T>
struct SgdStep : StepOf<T, StepForm::kSgd> {
  static SgdStep make(const SliceUpdate& update) { return {{}, Sgd<T>(*update.hyper)}; }
  PSSTORE_HD T operator()(T value, T grad) const { return rule.step(value, grad); }
  Sgd<T> rule;
};

template <class T>
struct SgdFirstMomentumStep : StepOf<T, StepForm::kSgdFirstMomentum, 0> {
  static SgdFirstMomentumStep make(const SliceUpdate& update) {
    return {{}, Sgd<T>(*update.hyper)};
  }
  PSSTORE_HD T operator()(T value, T grad, T& momentum_buffer) const {
    return rule.first_step(value, grad, momentum_buffer);
  }
  Sgd<T> rule;
};

template <class T>
struct SgdMomentumStep : StepOf<T, StepForm::kSgdMomentum, 0> {
  static SgdMomentumStep make(const SliceUpdate& update) { return {{}, Sgd<T>(*update.hyper)}; }
  PSSTORE_HD T operator()(T value, T grad, T& momentum_buffer) const {
    return rule.step(value, grad, momentum_buffer);
  }
  Sgd<T> rule;
};

template <class T>
Adam<T> adam_of(const SliceUpdate& update) {
  return Adam<T>(*update.hyper, update.step, update.rule == RuleKind::kAdamW);
}

template <class T>
struct AdamStep : StepOf<T, StepForm::kAdam, 0, 1> {
  static AdamStep make(const SliceUpdate& update) { return {{}, adam_of<T>(update)}; }
  PSSTORE_HD T operator()(T value, T grad, T& exp_avg, T& exp_avg_sq) const {
    return rule.step(value, grad, exp_avg, exp_avg_sq);
  }
  Adam<T> rule;
};

template <class T>
struct AmsgradStep : StepOf<T, StepForm::kAmsgrad, 0, 1, 2> {
  static AmsgradStep make(const SliceUpdate& update) { return {{}, adam_of<T>(update)}; }
  PSSTORE_HD T operator()(T value, T grad, T& exp_avg, T& exp_avg_sq, T& max) const {
    return rule.step_amsgrad(value, grad, exp_avg, exp_avg_sq, max);
  }
  Adam<T> rule;
};

template <class T>
struct AdagradStep : StepOf<T, StepForm::kAdagrad, 0> {
  static AdagradStep make(const SliceUpdate& update) {
    const T initial = static_cast<T>(update.hyper->initial_accumulator_value);
    return {{}, Adagrad<T>(*update.hyper, update.step), initial};
  }
  PSSTORE_HD T operator()(T value, T grad, T& sum) const { return rule.step(value, grad, sum); }
  PSSTORE_HD T initial() const { return initial_sum; }
  Adagrad<T> rule;
  T initial_sum;
};

template <class T>
struct RmsPropStep : StepOf<T, StepForm::kRmsProp, 0> {
  static RmsPropStep make(const SliceUpdate& update) { return {{}, RmsProp<T>(*update.hyper)}; }
  PSSTORE_HD T operator()(T value, T grad, T& square) const {
    return rule.step(value, grad, square);
  }
  RmsProp<T> rule;
};

template <class T>
struct RmsPropMomentumStep : StepOf<T, StepForm::kRmsPropMomentum, 0, 1> {
  static RmsPropMomentumStep make(const SliceUpdate& update) {
    return {{}, RmsProp<T>(*update.hyper)};
  }
  PSSTORE_HD T operator()(T value, T grad, T& square, T& buffer) const {
    return rule.step_momentum(value, grad, square, buffer);
  }
  RmsProp<T> rule;
};

template <class T>
struct RmsPropCenteredStep : StepOf<T, StepForm::kRmsPropCentered, 0, 2> {
  static RmsPropCenteredStep make(const SliceUpdate& update) {
    return {{}, RmsProp<T>(*update.hyper)};
  }
  PSSTORE_HD T operator()(T value, T grad, T& square, T& mean) const {
    return rule.step_centered(value, grad, square, mean);
  }
  RmsProp<T> rule;
};

template <class T>
struct RmsPropCenteredMomentumStep : StepOf<T, StepForm::kRmsPropCenteredMomentum, 0, 1, 2> {
  static RmsPropCenteredMomentumStep make(const SliceUpdate& update) {
    return {{}, RmsProp<T>(*update.hyper)};
  }
  PSSTORE_HD T operator()(T value, T grad, T& square, T& buffer, T& mean) const {
    return rule.step_centered_momentum(value, grad, square, buffer, mean);
  }
  RmsProp<T> rule;
};

template <class T>
struct DelayedNesterovStep : StepOf<T, StepForm::kDelayedNesterov, 0, 1> {
  static DelayedNesterovStep make(const SliceUpdate& update) {
    return {{}, DelayedNesterov<T>(*update.hyper)};
  }
  PSSTORE_HD T operator()(T value, T grad, T& buffer, T& sum) const {
    return rule.step(value, grad, buffer, sum);
  }
  DelayedNesterov<T> rule;
};

template <class T>
struct DelayedNesterovMomentumStep : StepOf<T, StepForm::kDelayedNesterovMomentum, 0, 1> {
  static DelayedNesterovMomentumStep make(const SliceUpdate& update) {
    return {{}, DelayedNesterov<T>(*update.hyper)};
  }
  PSSTORE_HD T operator()(T value, T grad, T& buffer, T& sum) const {
    return rule.step_momentum(value, grad, buffer, sum);
  }
  DelayedNesterov<T> rule;
};

inline StepForm sgd_form(const SliceUpdate& update) {
  if (update.hyper->momentum == 0) return StepForm::kSgd;
  return update.state_is_new & 1U ? StepForm::kSgdFirstMomentum : StepForm::kSgdMomentum;
}

inline StepForm rmsprop_form(const Hyper& hyper) {
  if (hyper.momentum > 0) {
    return hyper.centered ? StepForm::kRmsPropCenteredMomentum : StepForm::kRmsPropMomentum;
  }
  return hyper.centered ? StepForm::kRmsPropCentered : StepForm::kRmsProp;
}

inline StepForm delayed_nesterov_form(const SliceUpdate& update) {
  const bool moves = update.step % static_cast<int64_t>(update.hyper->every) == 0;
  return moves ? StepForm::kDelayedNesterovMomentum : StepForm::kDelayedNesterov;
}

// The form that an update takes.
inline StepForm step_form(const SliceUpdate& update) {
  switch (update.rule) {
    case RuleKind::kAssign:
    case RuleKind::kReduce:
    case RuleKind::kSparseSgd:  // of rows: kernels/rows.h
    case RuleKind::kSparseAdagrad:
    case RuleKind::kRowwiseAdagrad:
    case RuleKind::kSparseAdam:
    case RuleKind::kSparseMomentum:
    case RuleKind::kFtrl: break;
    case RuleKind::kAdd: return StepForm::kAdd;
    case RuleKind::kSgd: return sgd_form(update);
    case RuleKind::kAdam:
    case RuleKind::kAdamW: return update.hyper->amsgrad ? StepForm::kAmsgrad : StepForm::kAdam;
    case RuleKind::kAdagrad: return StepForm::kAdagrad;
    case RuleKind::kRmsProp: return rmsprop_form(*update.hyper);
    case RuleKind::kDelayedNesterov: return delayed_nesterov_form(update);
  }
  return StepForm::kAssign;
}

template <class T>
struct Type {
  using type = T;
};

// Calls `visit` with the Type<> of the form, and returns what it does.
template <class T, class Visit>
auto with_form(StepForm form, Visit visit) {
  switch (form) {
    case StepForm::kAssign: break;
    case StepForm::kAdd: return visit(Type<AddStep<T>>{});
    case StepForm::kSgd: return visit(Type<SgdStep<T>>{});
    case StepForm::kSgdFirstMomentum: return visit(Type<SgdFirstMomentumStep<T>>{});
    case StepForm::kSgdMomentum: return visit(Type<SgdMomentumStep<T>>{});
    case StepForm::kAdam: return visit(Type<AdamStep<T>>{});
    case StepForm::kAmsgrad: return visit(Type<AmsgradStep<T>>{});
    case StepForm::kAdagrad: return visit(Type<AdagradStep<T>>{});
    case StepForm::kRmsProp: return visit(Type<RmsPropStep<T>>{});
    case StepForm::kRmsPropMomentum: return visit(Type<RmsPropMomentumStep<T>>{});
    case StepForm::kRmsPropCentered: return visit(Type<RmsPropCenteredStep<T>>{});
    case StepForm::kRmsPropCenteredMomentum: return visit(Type<RmsPropCenteredMomentumStep<T>>{});
    case StepForm::kDelayedNesterov: return visit(Type<DelayedNesterovStep<T>>{});
    case StepForm::kDelayedNesterovMomentum: return visit(Type<DelayedNesterovMomentumStep<T>>{});
  }
  return visit(Type<AssignStep<T>>{});
}

}  // namespace PSSTORE_INSTRUCTION_SET
}  // namespace psstore
