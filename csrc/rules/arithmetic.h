// The few operations that update rules are made of, each rounded exactly as its name says.
//
// torch's CPU kernels fuse some multiply-adds and not others (docs/update_rules.md lists which), so a
// rule writes `multiply_add` where one rounding is meant and `a * b + c` where two are. Everything is
// compiled with contraction off, for host and device alike.
#pragma once

#include <math.h>

#include <cstdint>
#include <type_traits>

#include "core/host_device.h"
#include "core/instruction_set.h"

namespace psstore {
inline namespace PSSTORE_INSTRUCTION_SET {

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

// A choice that is the same for every element of a slice. By masks and not by a branch, because a branch
// on a loop's constant keeps GCC 12 from vectorising the loop (six times slower for Adam), and one copy
// of the loop per combination of options would be hundreds.
template <class T>
class Option {
 public:
  explicit Option(bool on) : mask_(on ? ~Bits{0} : Bits{0}) {}

  PSSTORE_HD T choose(T if_on, T if_off) const {
    const Bits on = __builtin_bit_cast(Bits, if_on) & mask_;
    const Bits off = __builtin_bit_cast(Bits, if_off) & ~mask_;
    return __builtin_bit_cast(T, on | off);
  }

 private:
  using Bits = std::conditional_t<sizeof(T) == sizeof(uint32_t), uint32_t, uint64_t>;
  Bits mask_;
};

// start + weight * (end - start) from whichever end is nearer, so that weight 1 gives `end` exactly.
// Source: torch.lerp with a scalar weight (ATen/native/Lerp.h).
template <class T>
class Lerp {
 public:
  explicit Lerp(T weight) : Lerp(weight, weight < T(0.5) && weight > T(-0.5)) {}

  PSSTORE_HD T operator()(T start, T end) const {
    return multiply_add(coefficient_, end - start, from_start_.choose(start, end));
  }

 private:
  Lerp(T weight, bool from_start)
      : coefficient_(from_start ? weight : weight - T(1)), from_start_(from_start) {}

  T coefficient_;
  Option<T> from_start_;
};

// What SGD, Adam, Adagrad and RMSprop all do to a gradient first: ascend if asked to, then L2 decay.
// Without decay nothing is added, not 0 * value: that would be NaN for an infinite value.
template <class T>
class DecayedGradient {
 public:
  DecayedGradient(bool maximize, double weight_decay)
      : ascends_(maximize), decays_(weight_decay != 0), decay_(static_cast<T>(weight_decay)) {}

  PSSTORE_HD T operator()(T value, T grad) const {
    const T direction = ascends_.choose(-grad, grad);
    const T decayed = multiply_add(value, decay_, direction);  // grad.add(param, alpha=decay)
    return decays_.choose(decayed, direction);
  }

 private:
  Option<T> ascends_;
  Option<T> decays_;
  T decay_;
};

}  // namespace PSSTORE_INSTRUCTION_SET
}  // namespace psstore
