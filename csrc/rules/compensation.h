// What a gradient that was taken at an earlier value would be at the one that it is applied to, to first order: DC-ASGD
// (Zheng et al., ICML 2017, arXiv:1609.08326), which has the square of the gradient for the diagonal of the Hessian.
#pragma once

#include "core/host_device.h"
#include "core/instruction_set.h"
#include "rules/arithmetic.h"

namespace psstore {
inline namespace PSSTORE_INSTRUCTION_SET {

template <class T>
class DelayCompensation {
 public:
  explicit DelayCompensation(double strength) : strength_(static_cast<T>(strength)) {}

  // grad + strength * grad * grad * (value - base): two products and the difference rounded by themselves, the last
  // product and the sum together.
  PSSTORE_HD T operator()(T grad, T value, T base) const {
    return multiply_add(strength_ * grad * grad, value - base, grad);
  }

 private:
  T strength_;
};

}  // namespace PSSTORE_INSTRUCTION_SET
}  // namespace psstore
