// The reads and writes of an encoder, and next to no arithmetic: how fast memory is in this mix.
//
// Compiled for each mix: floats are read, and with RESIDUAL others are read and written; of each ELEMS of them one
// WRITE is written. REQUIRES: a count that is a multiple of a cache line of WRITE, times ELEMS.
#include <stdint.h>

enum { kStep = 64 / sizeof(WRITE) };

void copy_loop(const float *source, float *residual, WRITE *out, int64_t count) {
  for (int64_t begin = 0; begin < count / ELEMS; begin += kStep) {
    float sum[kStep] = {0};
    for (int64_t part = begin * ELEMS; part < (begin + kStep) * ELEMS; part += kStep) {
#pragma omp simd
      for (int64_t i = 0; i < kStep; ++i) {
        sum[i] += source[part + i];
        if (RESIDUAL) residual[part + i] += source[part + i];
      }
    }
#pragma omp simd
    for (int64_t i = 0; i < kStep; ++i) out[begin + i] = (WRITE)(int32_t)sum[i];
  }
}
