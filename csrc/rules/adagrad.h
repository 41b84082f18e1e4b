// One element's step of Adagrad.
//
// Source: torch.optim.Adagrad (_single_tensor_adagrad); Duchi, Hazan & Singer, JMLR 12 (2011),
// the diagonal form of section 3.
#pragma once

#include "core/instruction_set.h"
#include "rules/arithmetic.h"
#include "rules/hyper.h"

namespace psstore {
inline namespace PSSTORE_INSTRUCTION_SET {

template <class T>
struct Adagrad {
  // `step` counts from 1.
  Adagrad(const Hyper& hyper, int64_t step)
      : decayed(hyper.maximize, hyper.weight_decay),
        eps(static_cast<T>(hyper.eps)),
        negative_lr(
            static_cast<T>(-(hyper.lr / (1 + (static_cast<double>(step) - 1) * hyper.lr_decay)))) {}

  PSSTORE_HD T step(T value, T grad, T& sum) const {
    const T direction = decayed(value, grad);
    sum = multiply_add(direction, direction, sum);
    const T deviation = square_root(sum) + eps;
    return value + negative_lr * direction / deviation;
  }

  DecayedGradient<T> decayed;
  T eps;
  T negative_lr;
};

}  // namespace PSSTORE_INSTRUCTION_SET
}  // namespace psstore
