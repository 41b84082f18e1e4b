// Where the baseline has all that there is (aarch64 has fused multiply-add in it): the plain kernels.
#include "kernels/kernel_set.h"

namespace psstore {

std::span<const KernelSet* const> runnable_kernels() {
  static constexpr const KernelSet* kRunnable[] = {&kPlainKernels};
  return kRunnable;
}

}  // namespace psstore
