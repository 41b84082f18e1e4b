// The kernel sets of x86-64 beyond the baseline; their flags are in kernels.cmake.
#pragma once

#include "kernels/kernel_set.h"

namespace psstore {

extern const KernelSet kAvx2Kernels;
extern const KernelSet kAvx512Kernels;

}  // namespace psstore
