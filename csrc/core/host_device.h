// Marks what is compiled for the host and for the device alike, and loops that a device's compiler is to leave
// as they are.
//
// Always inlined on the host: each instruction set's file must keep its own copy of the arithmetic, and
// the linker must not find one compiled for AVX-512 when it looks for the plain one.
#pragma once

#ifdef __CUDACC__
#define PSSTORE_HD __host__ __device__ __forceinline__
#define PSSTORE_ROLLED _Pragma("unroll 1")
#else
#define PSSTORE_HD inline __attribute__((always_inline))
#define PSSTORE_ROLLED
#endif
