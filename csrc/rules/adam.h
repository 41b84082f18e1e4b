// One element's step of Adam and of AdamW.
//
// Source: torch.optim.Adam (_single_tensor_adam). Kingma & Ba, arXiv:1412.6980, algorithm 1; AMSGrad:
// Reddi et al., arXiv:1904.09237, algorithm 2; AdamW's decoupled decay: Loshchilov & Hutter,
// arXiv:1711.05101, algorithm 2.
#pragma once

#include "core/instruction_set.h"
#include "rules/arithmetic.h"
#include "rules/hyper.h"

namespace psstore {
inline namespace PSSTORE_INSTRUCTION_SET {

template <class T>
struct Adam {
  // `step` counts from 1. The corrections are made in double and rounded once, as Python does; `pow`
  // and not `sqrt` for the root, because Python's ** 0.5 is pow.
  Adam(const Hyper& hyper, int64_t step, bool decoupled_decay)
      : decayed(hyper.maximize, decoupled_decay ? 0.0 : hyper.weight_decay),
        shrink(static_cast<T>(decoupled_decay ? 1 - hyper.lr * hyper.weight_decay : 1)),
        first_moment(static_cast<T>(1 - hyper.beta1)),
        beta2(static_cast<T>(hyper.beta2)),
        square_share(static_cast<T>(1 - hyper.beta2)),
        root_correction(static_cast<T>(::pow(bias_correction(hyper.beta2, step), 0.5))),
        eps(static_cast<T>(hyper.eps)),
        negative_step_size(static_cast<T>(-(hyper.lr / bias_correction(hyper.beta1, step)))) {}

  PSSTORE_HD T step(T value, T grad, T& exp_avg, T& exp_avg_sq) const {
    const T shrunk = update_moments(value, grad, exp_avg, exp_avg_sq);
    return descend(shrunk, exp_avg, exp_avg_sq);
  }

  PSSTORE_HD T step_amsgrad(T value, T grad, T& exp_avg, T& exp_avg_sq, T& max_exp_avg_sq) const {
    const T shrunk = update_moments(value, grad, exp_avg, exp_avg_sq);
    max_exp_avg_sq = maximum(max_exp_avg_sq, exp_avg_sq);
    return descend(shrunk, exp_avg, max_exp_avg_sq);
  }

  // Returns the value after decoupled decay; a shrink of 1 leaves every value as it is.
  PSSTORE_HD T update_moments(T value, T grad, T& exp_avg, T& exp_avg_sq) const {
    const T direction = decayed(value, grad);
    exp_avg = first_moment(exp_avg, direction);
    const T kept = exp_avg_sq * beta2;
    exp_avg_sq = multiply_add(square_share * direction, direction, kept);
    return value * shrink;
  }

  PSSTORE_HD T descend(T value, T exp_avg, T second_moment) const {
    const T denominator = square_root(second_moment) / root_correction + eps;
    return value + negative_step_size * exp_avg / denominator;
  }

  static double bias_correction(double beta, int64_t step) {
    return 1 - ::pow(beta, static_cast<double>(step));
  }

  DecayedGradient<T> decayed;
  T shrink;
  Lerp<T> first_moment;
  T beta2;
  T square_share;
  T root_correction;
  T eps;
  T negative_step_size;
};

}  // namespace PSSTORE_INSTRUCTION_SET
}  // namespace psstore
