// What an x86-64 machine can run, asked of the processor and of the system (which must save the registers).
#include <cpuid.h>

#include <vector>

#include "kernels/x86/sets.h"

namespace psstore {
namespace {

// Not every compiler's __builtin_cpu_supports() knows this one. Its registers are those of AVX2.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

// One line for each flag that kernels.cmake gives to avx2.cc.
bool runs_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}

// One line for each flag that kernels.cmake gives to avx512.cc.
bool runs_avx512() {
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

std::vector<const KernelSet*> find_runnable() {
  __builtin_cpu_init();
  std::vector<const KernelSet*> found;
  if (runs_avx512()) found.push_back(&kAvx512Kernels);
  if (runs_avx2()) found.push_back(&kAvx2Kernels);
  found.push_back(&kPlainKernels);
  return found;
}

}  // namespace

std::span<const KernelSet* const> runnable_kernels() {
  static const std::vector<const KernelSet*> runnable = find_runnable();
  return runnable;
}

}  // namespace psstore
