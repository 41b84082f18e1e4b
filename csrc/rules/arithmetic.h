// The few operations that update rules are made of, each rounded exactly as its name says.
//
// torch's CPU kernels fuse some multiply-adds and not others (docs/update_rules.md lists which), so a
// rule writes `multiply_add` where one rounding is meant and `a * b + c` where two are. Everything is
// compiled with contraction off, for host and device alike.
#pragma once

#include <math.h>

// Always inlined on the host: each instruction set's file must keep its own copy of the arithmetic, and
// the linker must not find one compiled for AVX-512 when it looks for the plain one.
#ifdef __CUDACC__
#define PSSTORE_HD __host__ __device__ __forceinline__
#else
#define PSSTORE_HD inline __attribute__((always_inline))
#endif

namespace psstore {

// a * b + c, rounded once.
PSSTORE_HD float multiply_add(float a, float b, float c) {
  return ::fmaf(a, b, c);
}
PSSTORE_HD double multiply_add(double a, double b, double c) {
  return ::fma(a, b, c);
}

PSSTORE_HD float square_root(float x) {
  return ::sqrtf(x);
}
PSSTORE_HD double square_root(double x) {
  return ::sqrt(x);
}

// The larger one; NaN if either is (torch.maximum).
template <class T>
PSSTORE_HD T maximum(T a, T b) {
  return (a > b || a != a) ? a : b;
}

// start + weight * (end - start) from whichever end is nearer, so that weight 1 gives `end` exactly.
// Source: torch.lerp with a scalar weight (ATen/native/Lerp.h).
template <class T>
struct Lerp {
  explicit Lerp(double weight_in_double)
      : weight(static_cast<T>(weight_in_double)),
        from_start(::fabs(static_cast<double>(weight)) < 0.5) {}

  PSSTORE_HD T operator()(T start, T end) const {
    const T coefficient = from_start ? weight : weight - T(1);
    const T base = from_start ? start : end;
    return multiply_add(coefficient, end - start, base);
  }

  T weight;
  bool from_start;
};

// What SGD, Adam, Adagrad and RMSprop all do to a gradient first: ascend if asked to, then L2 decay.
// The flag and not a zero decay decides, since 0 * inf would be NaN.
template <class T>
struct DecayedGradient {
  DecayedGradient(bool maximize, double weight_decay)
      : ascends(maximize), decays(weight_decay != 0), decay(static_cast<T>(weight_decay)) {}

  PSSTORE_HD T operator()(T value, T grad) const {
    const T direction = ascends ? -grad : grad;
    return decays ? multiply_add(value, decay, direction)
                  : direction;  // grad.add(param, alpha=decay)
  }

  bool ascends;
  bool decays;
  T decay;
};

}  // namespace psstore
