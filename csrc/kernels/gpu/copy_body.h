// Many copies in one launch: gathers what lies apart, or scatters what lies together.
//
// Vectors of 16 bytes lie by the alignment of what is written; what is read is taken by the widest accesses that
// its own alignment allows. A thread has the loads of several vectors under way before it stores the first:
// there is nothing else to do while they come.
#pragma once

#include "kernels/gpu/batch.h"
#include "kernels/gpu/block.h"
#include "kernels/gpu/memory.h"

namespace psstore::gpu {

inline constexpr int kCopyVectorBytes = 16;
// Of a thread at a time: 64 bytes, of 1024 threads on a multiprocessor twice what covers the latency of HBM
// (update_body.h).
inline constexpr int kCopyVectors = 4;

struct CopySlice {
  VectorMap bytes;
  int64_t first_chunk;  // of the launch's
  std::byte* to;
  const std::byte* from;

  int64_t num_chunks() const { return ceil_divide(bytes.num_chunks(), kCopyVectors); }
};

// The slices are followed by one whose first chunk is the number of chunks.
struct CopyView {
  const CopySlice* slices;
  const uint32_t* first_slices;  // of each block
  Grid grid;
};

struct CopyBody {
  using Shared = Nothing;
  using Local = Nothing;
  static constexpr int kMinBlocks = 4;

  CopyView batch;

  PSSTORE_GPU int num_phases(int64_t) const { return 1; }
  PSSTORE_GPU void run(int, int64_t block, int thread, Local&, Shared&) const {
    visit_slices(batch, block, [&](const CopySlice& slice, int64_t begin, int64_t end) {
      const std::byte* const first = slice.from - slice.bytes.lead;  // where a vector would begin
      if (is_aligned(first, 16)) return copy_chunks<16>(slice, begin, end, thread);
      if (is_aligned(first, 4)) return copy_chunks<4>(slice, begin, end, thread);
      if (is_aligned(first, 2)) return copy_chunks<2>(slice, begin, end, thread);
      copy_chunks<1>(slice, begin, end, thread);
    });
  }

 private:
  using Vector = Pack<uint32_t, kCopyVectorBytes / 4>;

  template <size_t kAlignment>
  PSSTORE_GPU void copy_chunks(const CopySlice& slice, int64_t begin, int64_t end,
                               int thread) const {
    PSSTORE_ROLLED
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t first = slice.bytes.begin(chunk * kCopyVectors, thread);
      const int64_t last = slice.bytes.begin(chunk * kCopyVectors + kCopyVectors - 1, thread);
      if (slice.bytes.is_whole(first) && slice.bytes.is_whole(last)) {
        copy_whole<kAlignment>(slice, first);
      } else {
        copy_ragged<kAlignment>(slice, chunk, thread);
      }
    }
  }

  template <size_t kAlignment>
  PSSTORE_GPU void copy_whole(const CopySlice& slice, int64_t first) const {
    constexpr int64_t kStride = int64_t{kThreads} * kCopyVectorBytes;
    Vector vectors[kCopyVectors];
    for (int j = 0; j < kCopyVectors; ++j) {
      vectors[j] = load_at<kAlignment, Vector>(slice.from + first + j * kStride);
    }
    for (int j = 0; j < kCopyVectors; ++j) {
      store_at<kCopyVectorBytes>(slice.to + first + j * kStride, vectors[j]);
    }
  }

  template <size_t kAlignment>
  PSSTORE_GPU void copy_ragged(const CopySlice& slice, int64_t chunk, int thread) const {
    PSSTORE_ROLLED
    for (int j = 0; j < kCopyVectors; ++j) {
      visit_vector(
          slice.bytes, slice.bytes.begin(chunk * kCopyVectors + j, thread),
          [&](int64_t begin) {
            store_at<kCopyVectorBytes>(slice.to + begin,
                                       load_at<kAlignment, Vector>(slice.from + begin));
          },
          [&](int64_t i) {
            store_at<1>(slice.to + i, load_at<1, Pack<uint8_t, 1>>(slice.from + i));
          });
    }
  }
};

}  // namespace psstore::gpu
