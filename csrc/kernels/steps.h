// The forms of a step, one for each set of state buffers and way through a rule: what a loop over elements
// is compiled for, on the CPU and on a GPU. Which of them an update takes is decided here, once per slice.
#pragma once

#include <cstdint>
#include <utility>

#include "kernels/update.h"
#include "rules/adagrad.h"
#include "rules/adam.h"
#include "rules/rmsprop.h"
#include "rules/sgd.h"

namespace psstore {

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
};
inline constexpr int kNumStepForms = 12;

// The slots of StateLayout whose buffers a form steps, in the order of its arguments.
template <int... kSlots>
using Slots = std::integer_sequence<int, kSlots...>;

// What a form is called with: (value, gradient, a reference to each state) -> the new value.
template <class T, StepForm form, int... kSlots>
struct StepOf {
  using Element = T;
  using States = Slots<kSlots...>;
  static constexpr StepForm kForm = form;

  PSSTORE_HD T initial() const { return T(0); }  // content of a state buffer that is new
};

template <class T>
struct AssignStep : StepOf<T, StepForm::kAssign> {
  PSSTORE_HD T operator()(T, T grad) const { return grad; }
};

template <class T>
struct AddStep : StepOf<T, StepForm::kAdd> {
  PSSTORE_HD T operator()(T value, T grad) const { return value + grad; }
};

template <class T>
struct SgdStep : StepOf<T, StepForm::kSgd> {
  PSSTORE_HD T operator()(T value, T grad) const { return rule.step(value, grad); }
  Sgd<T> rule;
};

template <class T>
struct SgdFirstMomentumStep : StepOf<T, StepForm::kSgdFirstMomentum, 0> {
  PSSTORE_HD T operator()(T value, T grad, T& momentum_buffer) const {
    return rule.first_step(value, grad, momentum_buffer);
  }
  Sgd<T> rule;
};

template <class T>
struct SgdMomentumStep : StepOf<T, StepForm::kSgdMomentum, 0> {
  PSSTORE_HD T operator()(T value, T grad, T& momentum_buffer) const {
    return rule.step(value, grad, momentum_buffer);
  }
  Sgd<T> rule;
};

template <class T>
struct AdamStep : StepOf<T, StepForm::kAdam, 0, 1> {
  PSSTORE_HD T operator()(T value, T grad, T& exp_avg, T& exp_avg_sq) const {
    return rule.step(value, grad, exp_avg, exp_avg_sq);
  }
  Adam<T> rule;
};

template <class T>
struct AmsgradStep : StepOf<T, StepForm::kAmsgrad, 0, 1, 2> {
  PSSTORE_HD T operator()(T value, T grad, T& exp_avg, T& exp_avg_sq, T& max) const {
    return rule.step_amsgrad(value, grad, exp_avg, exp_avg_sq, max);
  }
  Adam<T> rule;
};

template <class T>
struct AdagradStep : StepOf<T, StepForm::kAdagrad, 0> {
  PSSTORE_HD T operator()(T value, T grad, T& sum) const { return rule.step(value, grad, sum); }
  PSSTORE_HD T initial() const { return initial_sum; }
  Adagrad<T> rule;
  T initial_sum;
};

template <class T>
struct RmsPropStep : StepOf<T, StepForm::kRmsProp, 0> {
  PSSTORE_HD T operator()(T value, T grad, T& square) const {
    return rule.step(value, grad, square);
  }
  RmsProp<T> rule;
};

template <class T>
struct RmsPropMomentumStep : StepOf<T, StepForm::kRmsPropMomentum, 0, 1> {
  PSSTORE_HD T operator()(T value, T grad, T& square, T& buffer) const {
    return rule.step_momentum(value, grad, square, buffer);
  }
  RmsProp<T> rule;
};

template <class T>
struct RmsPropCenteredStep : StepOf<T, StepForm::kRmsPropCentered, 0, 2> {
  PSSTORE_HD T operator()(T value, T grad, T& square, T& mean) const {
    return rule.step_centered(value, grad, square, mean);
  }
  RmsProp<T> rule;
};

template <class T>
struct RmsPropCenteredMomentumStep : StepOf<T, StepForm::kRmsPropCenteredMomentum, 0, 1, 2> {
  PSSTORE_HD T operator()(T value, T grad, T& square, T& buffer, T& mean) const {
    return rule.step_centered_momentum(value, grad, square, buffer, mean);
  }
  RmsProp<T> rule;
};

// Calls `visit` with the form that the update takes, ready for its hyper-parameters and its step, and
// returns what it does. Host only: scalars are derived once for a slice.
template <class T, class Visit>
auto with_step(const SliceUpdate& update, Visit visit) {
  switch (update.rule) {
    case RuleKind::kAssign:
    case RuleKind::kReduce: break;
    case RuleKind::kAdd: return visit(AddStep<T>{});
    case RuleKind::kSgd: {
      const Sgd<T> rule(*update.hyper);
      if (update.hyper->momentum == 0) return visit(SgdStep<T>{{}, rule});
      if (update.state_is_new & 1U) return visit(SgdFirstMomentumStep<T>{{}, rule});
      return visit(SgdMomentumStep<T>{{}, rule});
    }
    case RuleKind::kAdam:
    case RuleKind::kAdamW: {
      const Adam<T> rule(*update.hyper, update.step, update.rule == RuleKind::kAdamW);
      if (update.hyper->amsgrad) return visit(AmsgradStep<T>{{}, rule});
      return visit(AdamStep<T>{{}, rule});
    }
    case RuleKind::kAdagrad: {
      const Adagrad<T> rule(*update.hyper, update.step);
      const T initial = static_cast<T>(update.hyper->initial_accumulator_value);
      return visit(AdagradStep<T>{{}, rule, initial});
    }
    case RuleKind::kRmsProp: {
      const RmsProp<T> rule(*update.hyper);
      const bool momentum = update.hyper->momentum > 0;
      if (momentum && update.hyper->centered) {
        return visit(RmsPropCenteredMomentumStep<T>{{}, rule});
      }
      if (momentum) return visit(RmsPropMomentumStep<T>{{}, rule});
      if (update.hyper->centered) return visit(RmsPropCenteredStep<T>{{}, rule});
      return visit(RmsPropStep<T>{{}, rule});
    }
  }
  return visit(AssignStep<T>{});
}

}  // namespace psstore
