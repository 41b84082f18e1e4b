// Many slices in one launch, each to its encoding, but for topk (topk_body.h). A block takes one chunk of a slice.
//
// int8 and sign: 32 threads encode 256 elements, in the order of kernels/codec_blocks.h. Thread t of the 32 has
// the elements t, t + 32, ...: neighbours in memory for neighbouring threads, and just what partial sum t of the
// CPU's mean is made of. Half precision: each thread has elements that are neighbours.
#pragma once

#include "kernels/codec.h"
#include "kernels/gpu/block.h"
#include "kernels/gpu/sources.h"

namespace psstore::gpu {

inline constexpr int kTeam = 32;
inline constexpr int kTeams = kThreads / kTeam;
inline constexpr int kTeamElems = static_cast<int>(kEncodedBlock) / kTeam;
static_assert(kTeam == kMeanLanes);

inline constexpr int64_t kEncodeChunk = kTeams * kEncodedBlock;
inline constexpr int kHalves = static_cast<int>(kEncodeChunk) / kThreads;  // of a thread: 16 bytes

struct EncodeSlice {
  ToEncode what;
  int64_t first_chunk;  // of the launch's

  int64_t num_chunks() const { return ceil_divide(what.num_elems, kEncodeChunk); }
};

struct EncodeView {
  const EncodeSlice* slices;
  const uint32_t* first_slices;  // of each block: whose chunk it takes
};

// Half precision, from element `begin` on.
template <class Half>
struct HalvesOfThread {
  ToEncode what;
  int64_t begin;

  PSSTORE_GPU void encode() const {
    if (begin + kHalves <= what.num_elems) return encode_pack<kHalves>(begin);
    PSSTORE_ROLLED
    for (int64_t i = begin; i < what.num_elems; ++i) encode_pack<1>(i);
  }

 private:
  // By accesses of 16 bytes: of a longer pack the compiler makes accesses of 8.
  template <int N>
  PSSTORE_GPU static Pack<float, N> load_floats(const void* floats, int64_t i) {
    constexpr int kWhole = N < 4 ? N : 4;
    Pack<float, N> all;
    for (int e = 0; e < N; e += kWhole) {
      const Pack<float, kWhole> some = load_widely<float, kWhole>(floats, i + e);
      for (int j = 0; j < kWhole; ++j) all[e + j] = some[j];
    }
    return all;
  }

  template <int N>
  PSSTORE_GPU void encode_pack(int64_t i) const {
    Pack<float, N> x = load_floats<N>(what.source, i);
    Pack<Half, N> halves;
    if (what.residual == nullptr) {
      for (int e = 0; e < N; ++e) halves[e] = rounded_to<Half>(x[e]);
      return store_pack(what.payload, i, halves);
    }
    Pack<float, N> rest = load_floats<N>(what.residual, i);
    for (int e = 0; e < N; ++e) {
      x[e] = x[e] + rest[e];
      halves[e] = rounded_to<Half>(x[e]);
      rest[e] = lacking(x[e], to_float(halves[e]), rest[e]);
    }
    store_pack(what.payload, i, halves);
    store_pack(what.residual, i, rest);
  }
};

// int8 and sign: the 256 elements from `begin` on.
struct BlockOfTeam {
  ToEncode what;
  int64_t begin;
  int lane;

  // 0 past the end, as the CPU fills up the last block.
  PSSTORE_GPU float element(int j) const {
    const int64_t i = begin + lane + j * kTeam;
    if (i >= what.num_elems) return 0.0F;
    const auto x = load_widely<float, 1>(what.source, i)[0];
    if (what.residual != nullptr) return x + load_widely<float, 1>(what.residual, i)[0];
    if (what.base != nullptr) return x - load_widely<float, 1>(what.base, i)[0];
    return x;
  }

  // Sums have the CPU's order; magnitudes as integers have the order of the numbers, and NaN comes last.
  PSSTORE_GPU float combined(float a, float b) const {
    if (what.encoding == DType::kSign) return a + b;
    return bits_of(a) > bits_of(b) ? a : b;
  }

  PSSTORE_GPU float scale(float reduced) const {
    if (what.encoding == DType::kInt8) return scale_of_largest(reduced);
    const int64_t rest = what.num_elems - begin;
    const int64_t count = rest < kEncodedBlock ? rest : kEncodedBlock;
    return finite_or_nan(reduced / static_cast<float>(count));
  }

  PSSTORE_GPU void encode(float scale, const float* x, uint8_t* negative) const {
    if (lane == 0) store_one(what.payload, begin / kEncodedBlock, scale);
    for (int j = 0; j < kTeamElems; ++j) {
      const int place = lane + j * kTeam;
      const int64_t i = begin + place;
      float decoded = 0.0F;
      if (what.encoding == DType::kSign) {
        const uint32_t sign = bits_of(x[j]) & kSignBit;
        negative[place] = static_cast<uint8_t>(sign >> 31);
        decoded = float_of(bits_of(scale) | sign);
      } else if (i < what.num_elems) {
        decoded = encode_int8(scale, x[j], i);
      }
      if (i < what.num_elems) keep(i, is_finite(scale), x[j], decoded);
    }
  }

  PSSTORE_GPU void write_bits(const uint8_t* negative) const {
    if (begin + lane * 8 >= what.num_elems) return;
    store_one(codes(), begin / 8 + lane, bits_of_bytes(negative + lane * 8));
  }

 private:
  PSSTORE_GPU std::byte* codes() const {
    return static_cast<std::byte*>(what.payload) + codes_offset(what.num_elems);
  }

  // A scale of 0, be it one that was rounded to it, says nothing.
  PSSTORE_GPU float encode_int8(float scale, float x, int64_t i) const {
    if (!(scale > 0)) {
      store_one(codes(), i, int8_t{0});
      return scale * 0.0F;
    }
    const float shifted = shifted_code(scale, x);
    store_one(codes(), i, static_cast<int8_t>(bits_of(shifted)));
    return scale * (shifted - kRounder);
  }

  PSSTORE_GPU void keep(int64_t i, bool finite, float x, float decoded) const {
    if (what.residual != nullptr && finite) {
      store_one(what.residual, i, x - decoded);
    } else if (what.base != nullptr) {
      store_one(what.base, i, load_widely<float, 1>(what.base, i)[0] + decoded);
    }
  }
};

struct EncodeBody {
  struct Shared {
    float lanes[kTeams][kTeam];
    alignas(8) uint8_t negative[kTeams][kEncodedBlock];
  };
  struct Local {
    float x[kTeamElems];
  };
  static constexpr int kMinBlocks = 4;

  EncodeView batch;

  // Read and reduced by thread, reduced by team in five halvings, encoded, and signs made bits; halves at once.
  PSSTORE_GPU int num_phases(int64_t block) const {
    const DType encoding = slice_of(block).what.encoding;
    return encoding == DType::kSign ? 8 : encoding == DType::kInt8 ? 7 : 1;
  }

  PSSTORE_GPU void run(int phase, int64_t block, int thread, Local& local, Shared& shared) const {
    const EncodeSlice& slice = slice_of(block);
    const int64_t chunk = (block - slice.first_chunk) * kEncodeChunk;
    if (slice.what.encoding == DType::kBFloat16) {
      HalvesOfThread<BFloat16>{slice.what, chunk + thread * kHalves}.encode();
    } else if (slice.what.encoding == DType::kFloat16) {
      HalvesOfThread<Float16>{slice.what, chunk + thread * kHalves}.encode();
    } else {
      const int team = thread / kTeam;
      const int64_t begin = chunk + team * kEncodedBlock;
      if (begin >= slice.what.num_elems) return;
      run_team(phase, {slice.what, begin, thread % kTeam}, local.x, shared.lanes[team],
               shared.negative[team]);
    }
  }

 private:
  PSSTORE_GPU const EncodeSlice& slice_of(int64_t block) const {
    return *global(batch.slices + *global(batch.first_slices + block));
  }

  PSSTORE_GPU static void run_team(int phase, const BlockOfTeam& block, float* x, float* lanes,
                                   uint8_t* negative) {
    const int lane = block.lane;
    if (phase == 0) {
      float reduced = 0.0F;
      for (int j = 0; j < kTeamElems; ++j) {
        x[j] = block.element(j);
        reduced = block.combined(reduced, float_of(magnitude_bits(x[j])));
      }
      lanes[lane] = reduced;
    } else if (phase <= 5) {
      const int width = kTeam >> phase;
      if (lane < width) lanes[lane] = block.combined(lanes[lane], lanes[lane + width]);
    } else if (phase == 6) {
      block.encode(block.scale(lanes[0]), x, negative);
    } else {
      block.write_bits(negative);
    }
  }
};

}  // namespace psstore::gpu
