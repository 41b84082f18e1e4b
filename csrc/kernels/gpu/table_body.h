// The table of a launch's descriptors, from page-locked memory, which a device reads over its bus, to its own.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/gpu/block.h"
#include "kernels/gpu/memory.h"

namespace psstore::gpu {

struct TableBody {
  using Shared = Nothing;
  using Local = Nothing;
  static constexpr int kMinBlocks = 4;
  static constexpr size_t kWordBytes = 16;
  using Word = Pack<uint32_t, kWordBytes / sizeof(uint32_t)>;

  std::byte* to;
  const std::byte* from;
  int64_t num_words;

  // Both have room for whole words, and are aligned to them.
  static TableBody of(std::byte* to, const std::byte* from, size_t num_bytes) {
    return {to, from, static_cast<int64_t>((num_bytes + kWordBytes - 1) / kWordBytes)};
  }

  int64_t num_blocks() const { return ceil_divide(num_words, kThreads); }
  PSSTORE_GPU int num_phases(int64_t) const { return 1; }
  PSSTORE_GPU void run(int, int64_t block, int thread, Local&, Shared&) const {
    const int64_t word = block * kThreads + thread;
    if (word >= num_words) return;
    const int64_t offset = word * int64_t{kWordBytes};
    store_at<kWordBytes>(to + offset, load_at<kWordBytes, Word>(from + offset));
  }
};

}  // namespace psstore::gpu
