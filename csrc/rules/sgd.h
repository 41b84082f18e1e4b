// One element's step of stochastic gradient descent.
//
// Source: torch.optim.SGD (_single_tensor_sgd); momentum after Sutskever et al., ICML 2013, with
// torch's sign and scaling of the learning rate.
#pragma once

#include "core/instruction_set.h"
#include "rules/arithmetic.h"
#include "rules/hyper.h"

namespace psstore {
inline namespace PSSTORE_INSTRUCTION_SET {

template <class T>
struct Sgd {
  explicit Sgd(const Hyper& hyper)
      : decayed(hyper.maximize, hyper.weight_decay),
        negative_lr(static_cast<T>(-hyper.lr)),
        momentum(static_cast<T>(hyper.momentum)),
        grad_share(static_cast<T>(1 - hyper.dampening)),
        nesterov(hyper.nesterov) {}

  // Without momentum.
  PSSTORE_HD T step(T value, T grad) const { return descend(value, decayed(value, grad)); }

  // The step that makes the buffer: it is the gradient itself, undampened.
  PSSTORE_HD T first_step(T value, T grad, T& momentum_buffer) const {
    momentum_buffer = decayed(value, grad);
    return follow(value, momentum_buffer, momentum_buffer);
  }

  PSSTORE_HD T step(T value, T grad, T& momentum_buffer) const {
    const T direction = decayed(value, grad);
    const T kept = momentum_buffer * momentum;
    momentum_buffer = multiply_add(direction, grad_share, kept);
    return follow(value, direction, momentum_buffer);
  }

  PSSTORE_HD T follow(T value, T direction, T momentum_buffer) const {
    const T ahead = multiply_add(momentum_buffer, momentum, direction);
    return descend(value, nesterov.choose(ahead, momentum_buffer));
  }

  PSSTORE_HD T descend(T value, T direction) const {
    return multiply_add(direction, negative_lr, value);
  }

  DecayedGradient<T> decayed;
  T negative_lr;
  T momentum;
  T grad_share;
  Option<T> nesterov;
};

}  // namespace PSSTORE_INSTRUCTION_SET
}  // namespace psstore
