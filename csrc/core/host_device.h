// Marks what is compiled for the host and for the device alike, and loops that a device's compiler is to leave
// as they are.
//
// PSSTORE_HD, the arithmetic of elements: always inlined on the host, whose loops are vectorised over it.
// PSSTORE_GPU, the bodies of a GPU's kernels: the host runs them in tests alone, where inlining would only
// take time to compile.
#pragma once

#ifdef __CUDACC__
#define PSSTORE_HD __host__ __device__ __forceinline__
#define PSSTORE_GPU PSSTORE_HD
#define PSSTORE_ROLLED _Pragma("unroll 1")
#else
#define PSSTORE_HD inline __attribute__((always_inline))
#define PSSTORE_GPU inline
#define PSSTORE_ROLLED
#endif
