// The sum of squares of each slice's reduced gradient, added in the CPU's order (kernels/squares.h), so that a
// global norm has the same bits on both: element i goes to partial sum i modulo 32, upwards.
//
// A block for each slice: its threads reduce a tile of gradients into shared memory, then 32 of them, a partial
// sum each, add its squares. That chain of additions is what the order costs: it hides behind the loads
// where many slices are under way, as when a model is cut into slices of 1 MiB at most.
#pragma once

#include "kernels/gpu/batch.h"
#include "kernels/gpu/block.h"
#include "kernels/gpu/sources.h"

namespace psstore::gpu {

inline constexpr int kSumLanes = 32;  // kLanes of kernels/squares.h

template <class T>
struct SquaresBody {
  static constexpr int kTile = kThreads * kVectorElems<T>;
  static_assert(kTile % kSumLanes == 0, "a tile begins with partial sum 0");

  struct Shared {
    T tile[kTile];
    double lanes[kSumLanes];
  };
  struct Local {
    double sum = 0;
  };
  static constexpr int kMinBlocks = 3;

  BatchView batch;
  double* sums;

  // Two of each tile, then the partial sums: put down, halved five times, handed out.
  PSSTORE_GPU int num_phases(int64_t block) const { return 2 * num_tiles(block) + 7; }

  PSSTORE_GPU void run(int phase, int64_t block, int thread, Local& local, Shared& shared) const {
    const Slice& slice = batch.slices[block];
    const int after = phase - 2 * num_tiles(block);
    if (after < 0) {
      const int64_t begin = int64_t{phase / 2} * kTile;
      if (phase % 2 == 0) {
        reduce_tile(slice, begin, thread, shared);
      } else if (thread < kSumLanes) {
        add_squares(slice.vectors.num_elems - begin, thread, local, shared);
      }
    } else if (after == 0) {
      if (thread < kSumLanes) shared.lanes[thread] = local.sum;
    } else if (after <= 5) {
      const int width = kSumLanes >> after;
      if (thread < width) shared.lanes[thread] += shared.lanes[thread + width];
    } else if (thread == 0) {
      sums[slice.position] = shared.lanes[0];
    }
  }

 private:
  PSSTORE_GPU int num_tiles(int64_t block) const {
    return static_cast<int>(ceil_divide(batch.slices[block].vectors.num_elems, kTile));
  }

  PSSTORE_GPU void reduce_tile(const Slice& slice, int64_t tile_begin, int thread,
                               Shared& shared) const {
    const AnySources<T> sources(batch, slice);
    const VectorMap vectors{slice.vectors.num_elems, kVectorElems<T>, 0};
    visit_vector(
        vectors, tile_begin + thread * kVectorElems<T>,
        [&](int64_t begin) {
          put<kVectorElems<T>>(slice, sources, begin, shared.tile + (begin - tile_begin));
        },
        [&](int64_t i) { put<1>(slice, sources, i, shared.tile + (i - tile_begin)); });
  }

  template <int N>
  PSSTORE_GPU void put(const Slice& slice, const AnySources<T>& sources, int64_t begin,
                       T* tile) const {
    Pack<T, N> grad = sources.template sum<N>(begin, sources.template load<N>(begin));
    divide_and_scale(grad, static_cast<T>(slice.divisor), T(1));
    for (int e = 0; e < N; ++e) tile[e] = grad[e];
  }

  // Exact for a float: the square of 24 bits fits the 53 of a double.
  PSSTORE_GPU void add_squares(int64_t count, int lane, Local& local, const Shared& shared) const {
    const int end = count < kTile ? static_cast<int>(count) : kTile;
    for (int i = lane; i < end; i += kSumLanes) {
      const auto element = static_cast<double>(shared.tile[i]);
      local.sum = local.sum + element * element;
    }
  }
};

}  // namespace psstore::gpu
