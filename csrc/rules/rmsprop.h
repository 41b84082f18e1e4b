// One element's step of RMSprop.
//
// Source: torch.optim.RMSprop (_single_tensor_rmsprop); Tieleman & Hinton, Coursera lecture 6.5 (2012);
// centered: Graves, arXiv:1308.0850, equations 38-45, with eps outside of the root.
#pragma once

#include "core/instruction_set.h"
#include "rules/arithmetic.h"
#include "rules/hyper.h"

namespace psstore {
inline namespace PSSTORE_INSTRUCTION_SET {

template <class T>
struct RmsProp {
  explicit RmsProp(const Hyper& hyper)
      : decayed(hyper.maximize, hyper.weight_decay),
        alpha(static_cast<T>(hyper.alpha)),
        square_share(static_cast<T>(1 - hyper.alpha)),
        mean(static_cast<T>(1 - hyper.alpha)),
        eps(static_cast<T>(hyper.eps)),
        momentum(static_cast<T>(hyper.momentum)),
        negative_lr(static_cast<T>(-hyper.lr)) {}

  PSSTORE_HD T step(T value, T grad, T& square_avg) const {
    const T direction = decayed(value, grad);
    update_square(direction, square_avg);
    return descend(value, direction, deviation(square_avg));
  }

  PSSTORE_HD T step_centered(T value, T grad, T& square_avg, T& grad_avg) const {
    const T direction = decayed(value, grad);
    update_square(direction, square_avg);
    return descend(value, direction, centered_deviation(direction, square_avg, grad_avg));
  }

  PSSTORE_HD T step_momentum(T value, T grad, T& square_avg, T& momentum_buffer) const {
    const T direction = decayed(value, grad);
    update_square(direction, square_avg);
    return follow(value, direction, deviation(square_avg), momentum_buffer);
  }

  PSSTORE_HD T step_centered_momentum(T value, T grad, T& square_avg, T& momentum_buffer,
                                      T& grad_avg) const {
    const T direction = decayed(value, grad);
    update_square(direction, square_avg);
    const T spread = centered_deviation(direction, square_avg, grad_avg);
    return follow(value, direction, spread, momentum_buffer);
  }

  PSSTORE_HD void update_square(T direction, T& square_avg) const {
    const T kept = square_avg * alpha;
    square_avg = multiply_add(square_share * direction, direction, kept);
  }

  PSSTORE_HD T deviation(T square_avg) const { return square_root(square_avg) + eps; }

  PSSTORE_HD T centered_deviation(T direction, T square_avg, T& grad_avg) const {
    grad_avg = mean(grad_avg, direction);
    return deviation(multiply_add(-grad_avg, grad_avg, square_avg));
  }

  PSSTORE_HD T descend(T value, T direction, T spread) const {
    return value + negative_lr * direction / spread;
  }

  PSSTORE_HD T follow(T value, T direction, T spread, T& momentum_buffer) const {
    const T kept = momentum_buffer * momentum;
    momentum_buffer = kept + direction / spread;
    return multiply_add(momentum_buffer, negative_lr, value);
  }

  DecayedGradient<T> decayed;
  T alpha;
  T square_share;
  Lerp<T> mean;
  T eps;
  T momentum;
  T negative_lr;
};

}  // namespace PSSTORE_INSTRUCTION_SET
}  // namespace psstore
