// Which elements a thread takes: vectors of a slice, chunks of vectors for a block, runs of chunks for a grid.
//
//   memory      ....|vvvv|vvvv|vvvv|      |: multiples of 16 bytes, to which vectors are aligned
//   slice         [-------------)
//   vector         0    1    2  3         the first and the last may stick out: there single elements
//
// Vectors lie by the alignment of the value that is written. One access takes them where they are whole, and
// inputs that are aligned alike; other inputs are read by element.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace psstore::gpu {

// One vector of each thread: 256 threads fill a multiprocessor evenly, whatever their registers, and 4 KiB,
// a small slice, is one chunk of floats.
inline constexpr int kThreads = 256;

// Enough blocks to fill any device many times over, so that its end is not waited for. With more a block is shorter, and
// what it reads of the table before its first load counts: 16,384 were up to 6 % slower on an H200, and 2,500 up to 4.
inline constexpr int64_t kMaxBlocks = 6144;

PSSTORE_GPU int64_t ceil_divide(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

struct VectorMap {
  int64_t num_elems;
  int vector_elems;
  int lead;  // elements by which the first vector begins before the slice

  PSSTORE_GPU int64_t num_vectors() const {
    return num_elems == 0 ? 0 : ceil_divide(lead + num_elems, vector_elems);
  }
  PSSTORE_GPU int64_t num_chunks() const { return ceil_divide(num_vectors(), kThreads); }

  // First element of a thread's vector in a chunk of this slice; may be below 0 or past the end.
  PSSTORE_GPU int64_t begin(int64_t chunk, int thread) const {
    return (chunk * kThreads + thread) * vector_elems - lead;
  }
  PSSTORE_GPU bool is_whole(int64_t begin) const {
    return begin >= 0 && begin + vector_elems <= num_elems;
  }
};

// Calls `whole(begin)` for a whole vector, or `one(i)` for each element of it that the slice has.
template <class Whole, class One>
PSSTORE_GPU void visit_vector(const VectorMap& map, int64_t begin, Whole whole, One one) {
  if (map.is_whole(begin)) {
    whole(begin);
  } else {
    PSSTORE_ROLLED
    for (int64_t i = begin < 0 ? 0 : begin; i < begin + map.vector_elems && i < map.num_elems;
         ++i) {
      one(i);
    }
  }
}

// Elements from the last multiple of 16 bytes to `address`; 0 where there is none at an element's distance.
inline int lead_of(const void* address, int64_t elem_bytes) {
  const auto past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(address) % 16);
  return past % elem_bytes == 0 ? static_cast<int>(past / elem_bytes) : 0;
}

// The grid of a launch: chunks in order, an equal run of them for each block.
struct Grid {
  int64_t num_chunks = 0;
  int64_t chunks_per_block = 1;

  static Grid of(int64_t num_chunks, int64_t max_blocks = kMaxBlocks) {
    const int64_t per_block = ceil_divide(num_chunks, max_blocks);
    return {num_chunks, per_block < 1 ? 1 : per_block};
  }

  PSSTORE_GPU int64_t num_blocks() const { return ceil_divide(num_chunks, chunks_per_block); }
  PSSTORE_GPU int64_t begin(int64_t block) const { return block * chunks_per_block; }
  PSSTORE_GPU int64_t end(int64_t block) const {
    const int64_t end = begin(block) + chunks_per_block;
    return end < num_chunks ? end : num_chunks;
  }
};

}  // namespace psstore::gpu
