// A plain hash map of rows, with what it takes to be fast: linear probing, at most half full, and look-ups in groups whose
// memory is on its way. mode 0 inserts ids, 1 gathers their rows, 2 steps them by Adagrad. A row is DIM values, then DIM sums.
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { kTogether = 32 };

static uint64_t hash_of(uint64_t id) { return id * 0x9E3779B97F4A7C15 >> 20; }

static uint32_t find(const uint64_t *keys, const uint32_t *places, uint64_t mask, uint64_t id) {
  uint64_t at = hash_of(id) & mask;
  while (keys[at] != id) at = (at + 1) & mask;
  return places[at];
}

// keys: ids + 1, so that 0 is a free place.
void row_loop(int32_t mode, const uint64_t *ids, int64_t count, uint64_t *keys, uint32_t *places,
              uint64_t mask, float *rows, float *values, float lr, float eps) {
  if (mode == 0) {
    for (int64_t i = 0; i < count; ++i) {
      uint64_t at = hash_of(ids[i] + 1) & mask;
      while (keys[at] != 0) at = (at + 1) & mask;
      keys[at] = ids[i] + 1;
      places[at] = (uint32_t)i;
    }
    return;
  }
  for (int64_t begin = 0; begin < count; begin += kTogether) {
    const int64_t here = count - begin < kTogether ? count - begin : kTogether;
    uint32_t found[kTogether];
    for (int64_t i = 0; i < here; ++i) {
      const uint64_t at = hash_of(ids[begin + i] + 1) & mask;
      __builtin_prefetch(&keys[at]);
      __builtin_prefetch(&places[at]);
    }
    for (int64_t i = 0; i < here; ++i) {
      found[i] = find(keys, places, mask, ids[begin + i] + 1);
      const float *row = rows + (int64_t)found[i] * 2 * DIM;
      const int64_t touched = mode == 1 ? DIM : 2 * DIM;
      for (int64_t k = 0; k < touched; k += 16) __builtin_prefetch(row + k);
    }
    for (int64_t i = 0; i < here; ++i) {
      float *row = rows + (int64_t)found[i] * 2 * DIM;
      float *value = values + (begin + i) * DIM;
      if (mode == 1) {
        memcpy(value, row, DIM * sizeof(float));
        continue;
      }
#pragma omp simd
      for (int64_t k = 0; k < DIM; ++k) {
        const float sum = row[DIM + k] + value[k] * value[k];
        row[DIM + k] = sum;
        row[k] -= lr * value[k] / (sqrtf(sum) + eps);
      }
    }
  }
}
