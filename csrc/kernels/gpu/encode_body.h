// int8 and sign: 32 threads encode a block of 256 elements, in the order of kernels/codec_blocks.h.
//
// Thread t of the 32 has the elements t, t + 32, ...: neighbours in memory for neighbouring threads, and just
// what partial sum t of the CPU's mean is made of.
#pragma once

#include "kernels/codec.h"
#include "kernels/gpu/block.h"
#include "kernels/gpu/sources.h"

namespace psstore::gpu {

inline constexpr int kTeam = 32;
inline constexpr int kTeams = kThreads / kTeam;
inline constexpr int kTeamElems = static_cast<int>(kEncodedBlock) / kTeam;
static_assert(kTeam == kMeanLanes);

struct EncodeBody {
  struct Shared {
    float lanes[kTeams][kTeam];
    alignas(8) uint8_t negative[kTeams][kEncodedBlock];
  };
  struct Local {
    float x[kTeamElems];
  };
  static constexpr int kMinBlocks = 4;

  ToEncode what;

  PSSTORE_GPU int64_t num_blocks() const {
    return ceil_divide(what.num_elems, kTeams * kEncodedBlock);
  }

  // Read and reduced by thread, reduced by team in five halvings, encoded, and signs made bits.
  PSSTORE_GPU int num_phases(int64_t) const { return what.encoding == DType::kSign ? 8 : 7; }

  PSSTORE_GPU void run(int phase, int64_t block, int thread, Local& local, Shared& shared) const {
    const int team = thread / kTeam;
    const int lane = thread % kTeam;
    const int64_t begin = (block * kTeams + team) * kEncodedBlock;
    if (begin >= what.num_elems) return;
    if (phase == 0) {
      for (int j = 0; j < kTeamElems; ++j) local.x[j] = element(begin + lane + j * kTeam);
      shared.lanes[team][lane] = reduced(local);
    } else if (phase <= 5) {
      const int width = kTeam >> phase;
      float* lanes = shared.lanes[team];
      if (lane < width) lanes[lane] = combined(lanes[lane], lanes[lane + width]);
    } else if (phase == 6) {
      encode(begin, lane, scale(begin, shared.lanes[team][0]), local, shared.negative[team]);
    } else if (begin + lane * 8 < what.num_elems) {
      store_one(codes(), begin / 8 + lane, bits_of_bytes(shared.negative[team] + lane * 8));
    }
  }

 private:
  // 0 past the end, as the CPU fills up the last block.
  PSSTORE_GPU float element(int64_t i) const {
    if (i >= what.num_elems) return 0.0F;
    const auto x = load_one<float>(what.source, i);
    if (what.residual != nullptr) return x + load_one<float>(what.residual, i);
    if (what.base != nullptr) return x - load_one<float>(what.base, i);
    return x;
  }

  // Sums have the CPU's order; magnitudes as integers have the order of the numbers, and NaN comes last.
  PSSTORE_GPU float combined(float a, float b) const {
    if (what.encoding == DType::kSign) return a + b;
    return bits_of(a) > bits_of(b) ? a : b;
  }

  PSSTORE_GPU float reduced(const Local& local) const {
    float lane = 0.0F;
    for (int j = 0; j < kTeamElems; ++j) {
      lane = combined(lane, float_of(magnitude_bits(local.x[j])));
    }
    return lane;
  }

  PSSTORE_GPU float scale(int64_t begin, float reduced) const {
    if (what.encoding == DType::kInt8) return scale_of_largest(reduced);
    const int64_t rest = what.num_elems - begin;
    const int64_t count = rest < kEncodedBlock ? rest : kEncodedBlock;
    return finite_or_nan(reduced / static_cast<float>(count));
  }

  PSSTORE_GPU std::byte* codes() const {
    return static_cast<std::byte*>(what.payload) + codes_offset(what.num_elems);
  }

  PSSTORE_GPU void encode(int64_t begin, int lane, float scale, const Local& local,
                          uint8_t* negative) const {
    if (lane == 0) store_one(what.payload, begin / kEncodedBlock, scale);
    for (int j = 0; j < kTeamElems; ++j) {
      const int place = lane + j * kTeam;
      const int64_t i = begin + place;
      const float x = local.x[j];
      float decoded = 0.0F;
      if (what.encoding == DType::kSign) {
        const uint32_t sign = bits_of(x) & kSignBit;
        negative[place] = static_cast<uint8_t>(sign >> 31);
        decoded = float_of(bits_of(scale) | sign);
      } else if (i < what.num_elems) {
        decoded = encode_int8(scale, x, i);
      }
      if (i < what.num_elems) keep(i, is_finite(scale), x, decoded);
    }
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
      store_one(what.base, i, load_one<float>(what.base, i) + decoded);
    }
  }
};

}  // namespace psstore::gpu
