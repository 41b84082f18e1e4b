// The reads and writes of a step, and next to no arithmetic: how fast memory is in this mix.
//
// Compiled for each mix: READS arrays of READ are read, one for ELEMS elements; CHANGED arrays of floats are read
// and written. It fetches ahead, which makes it up to 15 % faster than the same loop that leaves this to the
// processor. REQUIRES: a count that is a multiple of a cache line of READ, times ELEMS.
#include <stdint.h>

enum { kLineBytes = 64, kAheadBytes = 1024, kStep = kLineBytes / sizeof(READ) };

void plain_loop(const READ *const *reads, float *const *changes, int64_t count) {
  const READ *read[READS];
  float *change[CHANGED];
  for (int k = 0; k < READS; ++k) read[k] = reads[k];
  for (int k = 0; k < CHANGED; ++k) change[k] = changes[k];
  const int64_t floats = kLineBytes / sizeof(float);
  for (int64_t begin = 0; begin < count / ELEMS; begin += kStep) {
    for (int k = 0; k < READS; ++k) {
      __builtin_prefetch((const char *)(read[k] + begin) + kAheadBytes);
    }
    float sum[kStep];
#pragma omp simd
    for (int64_t i = 0; i < kStep; ++i) {
      sum[i] = 0;
      for (int k = 0; k < READS; ++k) sum[i] += read[k][begin + i];
    }
    for (int64_t part = begin * ELEMS; part < (begin + kStep) * ELEMS; part += kStep) {
      for (int k = 0; k < CHANGED; ++k) {
        for (int64_t line = part; line < part + kStep; line += floats) {
          __builtin_prefetch((const char *)(change[k] + line) + kAheadBytes);
        }
      }
#pragma omp simd
      for (int64_t i = 0; i < kStep; ++i) {
        for (int k = 0; k < CHANGED; ++k) change[k][part + i] += sum[i];
      }
    }
  }
}
