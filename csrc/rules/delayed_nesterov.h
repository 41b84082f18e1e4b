// One element's step of delayed Nesterov: descent by each gradient alone, and a momentum that only every so many of them
// moves, by their mean.
//
// Source: Liu et al., arXiv:2401.09135 ("Asynchronous Local-SGD Training for Language Modeling"), algorithm 3, whose N is
// `every` and whose c is `activation`. With every = 1 it is SGD with Nesterov momentum, bit for bit (rules/sgd.h).
#pragma once

#include "core/instruction_set.h"
#include "rules/arithmetic.h"
#include "rules/hyper.h"

namespace psstore {
inline namespace PSSTORE_INSTRUCTION_SET {

template <class T>
struct DelayedNesterov {
  explicit DelayedNesterov(const Hyper& hyper)
      : negative_lr(static_cast<T>(-hyper.lr)),
        momentum(static_cast<T>(hyper.momentum)),
        grad_share(static_cast<T>(1 / hyper.every)),
        momentum_between(static_cast<T>(hyper.activation * hyper.momentum)),
        momentum_now(static_cast<T>((1 - hyper.activation * hyper.every + hyper.activation) *
                                    hyper.momentum)) {}

  // Of the steps in between: the gradient is kept for the momentum, which is what it was.
  PSSTORE_HD T step(T value, T grad, T momentum_buffer, T& gradient_sum) const {
    gradient_sum = gradient_sum + grad;
    return descend(value, grad, momentum_buffer, momentum_between);
  }

  // Of every so many: the momentum takes up the mean of the gradients since the last time.
  PSSTORE_HD T step_momentum(T value, T grad, T& momentum_buffer, T& gradient_sum) const {
    const T kept = momentum_buffer * momentum;
    momentum_buffer = multiply_add(gradient_sum + grad, grad_share, kept);
    gradient_sum = T(0);
    return descend(value, grad, momentum_buffer, momentum_now);
  }

  PSSTORE_HD T descend(T value, T grad, T momentum_buffer, T momentum_share) const {
    const T direction = multiply_add(momentum_buffer, momentum_share, grad * grad_share);
    return multiply_add(direction, negative_lr, value);
  }

  T negative_lr;
  T momentum;
  T grad_share;
  T momentum_between;
  T momentum_now;
};

}  // namespace PSSTORE_INSTRUCTION_SET
}  // namespace psstore
