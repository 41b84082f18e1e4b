// One element's step of the rules of rows: what torch does to a row that a sparse gradient names, FBGEMM's rowwise
// Adagrad, and FTRL-Proximal. SGD with momentum is not here: a row steps as a slice does (rules/sgd.h).
//
// Sources: torch.optim.SGD, torch.optim.Adagrad (the sparse branch of _single_tensor_adagrad) and torch.optim.SparseAdam
// (_functional.sparse_adam). torch adds sparse values to dense ones by axpy, which its BLAS rounds once. A rule of the same
// name for dense gradients rounds elsewhere: Adagrad's quotient is rounded before it is multiplied by the learning rate here.
#pragma once

#include "core/instruction_set.h"
#include "rules/arithmetic.h"
#include "rules/hyper.h"

namespace psstore {
inline namespace PSSTORE_INSTRUCTION_SET {

struct SparseSgd {
  explicit SparseSgd(const Hyper& hyper) : negative_lr(static_cast<float>(-hyper.lr)) {}

  PSSTORE_HD float step(float value, float grad) const {
    return multiply_add(grad, negative_lr, value);
  }

  float negative_lr;
};

struct SparseAdagrad {
  // `step` counts from 1, and is the table's.
  SparseAdagrad(const Hyper& hyper, int64_t step)
      : eps(static_cast<float>(hyper.eps)),
        negative_lr(static_cast<float>(
            -(hyper.lr / (1 + (static_cast<double>(step) - 1) * hyper.lr_decay)))) {}

  PSSTORE_HD float step(float value, float grad, float& sum) const {
    const float square = grad * grad;
    sum = sum + square;
    const float direction = grad / (square_root(sum) + eps);
    return multiply_add(direction, negative_lr, value);
  }

  float eps;
  float negative_lr;
};

// Source: FBGEMM, rowwise_adagrad (split_table_batched_embeddings): one sum for each row, of the mean square.
struct RowwiseAdagrad {
  explicit RowwiseAdagrad(const Hyper& hyper)
      : eps(static_cast<float>(hyper.eps)), lr(static_cast<float>(hyper.lr)) {}

  // What a row's gradient is multiplied by.
  PSSTORE_HD float factor(float mean_square, float& sum) const {
    sum = sum + mean_square;
    return -(lr / (square_root(sum) + eps));
  }
  PSSTORE_HD float step(float value, float grad, float factor) const {
    return multiply_add(grad, factor, value);
  }

  float eps;
  float lr;
};

struct SparseAdam {
  // `step` counts from 1, and is the table's.
  SparseAdam(const Hyper& hyper, int64_t step)
      : first_share(static_cast<float>(1 - hyper.beta1)),
        square_share(static_cast<float>(1 - hyper.beta2)),
        eps(static_cast<float>(hyper.eps)),
        negative_step_size(static_cast<float>(
            -(hyper.lr * ::sqrt(correction(hyper.beta2, step)) / correction(hyper.beta1, step)))) {}

  PSSTORE_HD float step(float value, float grad, float& exp_avg, float& exp_avg_sq) const {
    exp_avg = (grad - exp_avg) * first_share + exp_avg;
    exp_avg_sq = (grad * grad - exp_avg_sq) * square_share + exp_avg_sq;
    const float direction = exp_avg / (square_root(exp_avg_sq) + eps);
    return value + negative_step_size * direction;
  }

  static double correction(double beta, int64_t step) {
    return 1 - ::pow(beta, static_cast<double>(step));
  }

  float first_share;
  float square_share;
  float eps;
  float negative_step_size;
};

// What FTRL divides by: a sum of squares to the power of -lr_power.
struct SquareRootPower {
  PSSTORE_HD float operator()(float sum) const { return square_root(sum); }
};
struct AnyPower {
  explicit AnyPower(const Hyper& hyper) : exponent(-hyper.lr_power) {}

  PSSTORE_HD float operator()(float sum) const {
    return static_cast<float>(::pow(static_cast<double>(sum), exponent));
  }

  double exponent;
};

// Source: TensorFlow, SparseApplyFtrlV2 (ComputeFtrl of training_ops.cc), with Keras' beta; McMahan et al., "Ad Click
// Prediction: a View from the Trenches", KDD 2013, algorithm 1, whose lambda_2 is twice l2.
//
// `Power`: SquareRootPower for lr_power -0.5, as in the paper, which has the same bits everywhere and is vectorised; else
// AnyPower.
template <class Power>
struct Ftrl {
  Ftrl(const Hyper& hyper, Power of_sum)
      : power(of_sum),
        lr(static_cast<float>(hyper.lr)),
        l1(static_cast<float>(hyper.l1)),
        denominator_shift(static_cast<float>(2 * hyper.l2 + hyper.beta / hyper.lr)),
        shrinkage(static_cast<float>(2 * hyper.l2_shrinkage)) {}

  // An element that has no gradient yet, and begins without a sum, is 0: TensorFlow has 0 / 0 there.
  PSSTORE_HD float step(float value, float grad, float& accumulator, float& linear) const {
    const float power_before = power(accumulator);
    accumulator = accumulator + grad * grad;
    const float power_now = power(accumulator);
    const float shrunk_grad = grad + shrinkage * value;
    const float sigma = (power_now - power_before) / lr;
    linear = linear + (shrunk_grad - sigma * value);
    const float denominator = power_now / lr + denominator_shift;
    const float beyond_l1 = clamped(linear) - linear;
    return denominator == 0 ? 0.0F : beyond_l1 / denominator;
  }

  PSSTORE_HD float clamped(float x) const {
    const float below = x > l1 ? l1 : x;
    return below < -l1 ? -l1 : below;
  }

  Power power;
  float lr;
  float l1;
  float denominator_shift;
  float shrinkage;
};

}  // namespace PSSTORE_INSTRUCTION_SET
}  // namespace psstore
