// topk: the cut digit by digit as in kernels/codec_topk.h, but with all elements counted at once; then each tile
// of elements is told how many are kept before it, and writes its own, so that indices ascend.
//
//   begin -> (count -> pick) for each digit -> count tiles -> scan -> write
//
// Everything that is added here is an integer, so that no order of the threads can change what comes out.
#pragma once

#include "kernels/codec.h"
#include "kernels/gpu/block.h"
#include "kernels/gpu/sources.h"

namespace psstore::gpu {

inline constexpr int kTopkTile = 4096;
inline constexpr int kTopkElems = kTopkTile / kThreads;  // of a thread
inline constexpr int kNumBins = 1 << kDigitBits[0];

using Count = unsigned long long;  // what atomicAdd knows 64 bits by

// Elements of a tile above the cut, and at it; after the scan, those of all tiles before.
struct TileCounts {
  Count above;
  Count equal;
};

// Device memory; followed by the counts of the tiles.
struct TopkScratch {
  Cut cut;
  Count bins[kNumBins];

  PSSTORE_GPU TileCounts* tiles() { return reinterpret_cast<TileCounts*>(this + 1); }
};

inline int64_t num_topk_tiles(const ToEncode& what) {
  return ceil_divide(what.num_elems, kTopkTile);
}
inline size_t topk_scratch_bytes(const ToEncode& what) {
  return sizeof(TopkScratch) + static_cast<size_t>(num_topk_tiles(what)) * sizeof(TileCounts);
}

// Bits below digit number `digit`.
PSSTORE_GPU int shift_below(int digit) {
  return digit == 0 ? 20 : digit == 1 ? 10 : 0;
}
PSSTORE_GPU int digit_bits(int digit) {
  return digit == 0 ? 11 : 10;
}
static_assert(kDigitBits[0] == 11 && kDigitBits[1] == 10 && kDigitBits[2] == 10);

PSSTORE_GPU float topk_element(const ToEncode& what, int64_t i) {
  const auto x = load_widely<float, 1>(what.source, i)[0];
  return what.residual == nullptr ? x : x + load_widely<float, 1>(what.residual, i)[0];
}

// One block.
struct TopkBeginBody {
  using Shared = Nothing;
  using Local = Nothing;
  static constexpr int kMinBlocks = 4;

  ToEncode what;
  TopkScratch* scratch;

  PSSTORE_GPU int num_phases(int64_t) const { return 1; }
  PSSTORE_GPU void run(int, int64_t, int thread, Local&, Shared&) const {
    for (int bin = thread; bin < kNumBins; bin += kThreads) scratch->bins[bin] = 0;
    if (thread == 0) scratch->cut = what.num_kept > 0 ? Cut{0, what.num_kept} : kKeepNothing;
  }
};

// A block for each tile: elements that share the cut's digits so far, by their next one.
struct TopkCountBody {
  struct Shared {
    uint32_t bins[kNumBins];
  };
  using Local = Nothing;
  static constexpr int kMinBlocks = 4;

  ToEncode what;
  TopkScratch* scratch;
  int digit;

  PSSTORE_GPU int num_phases(int64_t) const { return 3; }
  PSSTORE_GPU void run(int phase, int64_t block, int thread, Local&, Shared& shared) const {
    if (phase == 1) return count(block * kTopkTile, thread, shared);
    for (int bin = thread; bin < kNumBins; bin += kThreads) {
      if (phase == 0) {
        shared.bins[bin] = 0;
      } else if (shared.bins[bin] != 0) {
        add_atomically(&scratch->bins[bin], Count{shared.bins[bin]});
      }
    }
  }

 private:
  PSSTORE_GPU void count(int64_t tile, int thread, Shared& shared) const {
    const int shift = shift_below(digit);
    const int bits = digit_bits(digit);
    const uint32_t above = scratch->cut.magnitude;
    for (int j = 0; j < kTopkElems; ++j) {
      const int64_t i = tile + j * kThreads + thread;
      if (i >= what.num_elems) return;
      const uint32_t magnitude = magnitude_bits(topk_element(what, i));
      if (magnitude >> shift >> bits != above) continue;
      add_atomically(&shared.bins[magnitude >> shift & ((1U << bits) - 1)], 1U);
    }
  }
};

// One block: the highest bin at which the elements from above are as many as are still to be found.
struct TopkPickBody {
  static constexpr int kBins = kNumBins / kThreads;  // of a thread

  struct Shared {
    Count sums[kThreads];
  };
  using Local = Nothing;
  static constexpr int kMinBlocks = 4;

  TopkScratch* scratch;
  int digit;

  PSSTORE_GPU int num_phases(int64_t) const { return 3; }
  PSSTORE_GPU void run(int phase, int64_t, int thread, Local&, Shared& shared) const {
    Count* own = scratch->bins + thread * kBins;
    if (phase == 0) {
      shared.sums[thread] = 0;
      for (int j = 0; j < kBins; ++j) shared.sums[thread] += own[j];
    } else if (phase == 1) {
      if (thread == 0) pick(shared);
    } else {
      for (int j = 0; j < kBins; ++j) own[j] = 0;  // for the next digit
    }
  }

 private:
  PSSTORE_GPU void pick(const Shared& shared) const {
    Cut cut = scratch->cut;
    int part = kThreads - 1;
    for (; part > 0 && shared.sums[part] < static_cast<Count>(cut.num_equal); --part) {
      cut.num_equal -= static_cast<int64_t>(shared.sums[part]);
    }
    int bin = part * kBins + kBins - 1;
    for (; bin > 0 && scratch->bins[bin] < static_cast<Count>(cut.num_equal); --bin) {
      cut.num_equal -= static_cast<int64_t>(scratch->bins[bin]);
    }
    cut.magnitude = cut.magnitude << digit_bits(digit) | static_cast<uint32_t>(bin);
    scratch->cut = cut;
  }
};

// What a thread finds in neighbouring elements of its own. Without a constructor: nobody may write to what is
// shared before the first phase.
struct TopkOwn {
  uint32_t above;
  uint32_t equal;
};

PSSTORE_GPU TopkOwn count_own(const ToEncode& what, const Cut& cut, int64_t begin) {
  TopkOwn own{0, 0};
  for (int64_t i = begin; i < begin + kTopkElems && i < what.num_elems; ++i) {
    const uint32_t magnitude = magnitude_bits(topk_element(what, i));
    own.above += magnitude > cut.magnitude ? 1U : 0U;
    own.equal += magnitude == cut.magnitude ? 1U : 0U;
  }
  return own;
}

// A block for each tile.
struct TopkTileBody {
  struct Shared {
    uint32_t above;
    uint32_t equal;
  };
  using Local = Nothing;
  static constexpr int kMinBlocks = 4;

  ToEncode what;
  TopkScratch* scratch;

  PSSTORE_GPU int num_phases(int64_t) const { return 3; }
  PSSTORE_GPU void run(int phase, int64_t block, int thread, Local&, Shared& shared) const {
    if (phase == 0) {
      if (thread == 0) shared.above = shared.equal = 0;
    } else if (phase == 1) {
      const int64_t begin = block * kTopkTile + thread * kTopkElems;
      const TopkOwn own = count_own(what, scratch->cut, begin);
      if (own.above != 0) add_atomically(&shared.above, own.above);
      if (own.equal != 0) add_atomically(&shared.equal, own.equal);
    } else if (thread == 0) {
      scratch->tiles()[block] = {shared.above, shared.equal};
    }
  }
};

// One block: each thread a run of tiles, whose counts become those of all tiles before.
struct TopkScanBody {
  struct Shared {
    TileCounts before[kThreads];
  };
  using Local = Nothing;
  static constexpr int kMinBlocks = 4;

  int64_t num_tiles;
  TopkScratch* scratch;

  PSSTORE_GPU int num_phases(int64_t) const { return 3; }
  PSSTORE_GPU void run(int phase, int64_t, int thread, Local&, Shared& shared) const {
    if (phase == 0) {
      shared.before[thread] = scan_own(thread, {0, 0}, false);
    } else if (phase == 2) {
      scan_own(thread, shared.before[thread], true);
    } else if (thread == 0) {
      TileCounts sum{0, 0};
      for (int other = 0; other < kThreads; ++other) sum = exchange(shared.before[other], sum);
    }
  }

 private:
  // `place` becomes what was before it; returns what is before the next.
  PSSTORE_GPU static TileCounts exchange(TileCounts& place, const TileCounts& before) {
    const TileCounts next{before.above + place.above, before.equal + place.equal};
    place = before;
    return next;
  }

  PSSTORE_GPU TileCounts scan_own(int thread, TileCounts sum, bool writes) const {
    const int64_t run = ceil_divide(num_tiles, kThreads);
    for (int64_t tile = thread * run; tile < (thread + 1) * run && tile < num_tiles; ++tile) {
      TileCounts counts = scratch->tiles()[tile];
      sum = exchange(counts, sum);
      if (writes) scratch->tiles()[tile] = counts;
    }
    return sum;
  }
};

// A block for each tile: the entries, and the residual of all its elements.
struct TopkWriteBody {
  static constexpr int kGroup = 16;  // threads whose counts are added up by one, and groups of them
  static_assert(kGroup * kGroup == kThreads);

  struct Shared {
    TopkOwn before[kThreads];  // of the group
    TopkOwn groups[kGroup];    // of the tile
  };
  using Local = Nothing;
  static constexpr int kMinBlocks = 4;

  ToEncode what;
  TopkScratch* scratch;

  PSSTORE_GPU int num_phases(int64_t) const { return 4; }
  PSSTORE_GPU void run(int phase, int64_t block, int thread, Local&, Shared& shared) const {
    const int64_t begin = block * kTopkTile + thread * kTopkElems;
    if (phase == 0) {
      shared.before[thread] = count_own(what, scratch->cut, begin);
    } else if (phase == 1) {
      if (thread < kGroup) shared.groups[thread] = scan(shared.before + thread * kGroup);
    } else if (phase == 2) {
      if (thread == 0) scan(shared.groups);
    } else {
      const TopkOwn& group = shared.groups[thread / kGroup];
      const TopkOwn& own = shared.before[thread];
      const TileCounts& tile = scratch->tiles()[block];
      write(begin, tile.above + group.above + own.above, tile.equal + group.equal + own.equal);
    }
  }

 private:
  // kGroup counts become those of all before; returns the sum.
  PSSTORE_GPU static TopkOwn scan(TopkOwn* counts) {
    TopkOwn sum{0, 0};
    for (int i = 0; i < kGroup; ++i) {
      const TopkOwn own = counts[i];
      counts[i] = sum;
      sum = {sum.above + own.above, sum.equal + own.equal};
    }
    return sum;
  }

  // The elements from `begin` on; `above` and `equal` lie before it.
  PSSTORE_GPU void write(int64_t begin, Count above, Count equal) const {
    const Cut cut = scratch->cut;
    const auto num_equal = static_cast<Count>(cut.num_equal);
    for (int64_t i = begin; i < begin + kTopkElems && i < what.num_elems; ++i) {
      const float x = topk_element(what, i);
      const uint32_t magnitude = magnitude_bits(x);
      const bool is_above = magnitude > cut.magnitude;
      const bool is_equal = magnitude == cut.magnitude;
      const bool is_kept = is_above || (is_equal && equal < num_equal);
      const Count entry = above + (equal < num_equal ? equal : num_equal);
      if (is_kept) write_entry(static_cast<int64_t>(entry), i, x);
      if (what.residual != nullptr && is_finite(x)) {
        store_one(what.residual, i, is_kept ? 0.0F : x);
      }
      above += is_above ? 1U : 0U;
      equal += is_equal ? 1U : 0U;
    }
  }

  PSSTORE_GPU void write_entry(int64_t entry, int64_t i, float x) const {
    auto* indices = static_cast<std::byte*>(what.payload);
    store_one(indices, entry, static_cast<uint32_t>(i));
    store_one(indices + what.num_kept * int64_t{sizeof(uint32_t)}, entry, x);
  }
};

}  // namespace psstore::gpu
