// The contributions that wait in a slot for their decision: at most one per rank.
//
// A contribution refers to the frame's payload, it does not copy it; the payload lives until the last
// slice of it is applied or replaced. Guarded, like all of a slot, by the stripe's lock.
#pragma once

#include <cstddef>
#include <vector>

#include "core/buffer.h"
#include "table/decision.h"

namespace psstore {

// One slice of a received payload. Any alignment: slices of several dtypes may share a frame.
struct PayloadSlice {
  BufferRef payload;
  size_t offset = 0;
  size_t num_bytes = 0;
  DType dtype = DType::kFloat32;

  const std::byte* data() const { return payload ? payload->data() + offset : nullptr; }
};

struct StagedContribution {
  Origin origin;
  PayloadSlice slice;
};

enum class Staged : uint8_t {
  kTaken,  // it is the rank's contribution now
  kLate,   // a later round of the same life is staged already: nothing to do
  kStale,  // a later life of the rank has staged here
};

class Staging {
 public:
  Staged offer(StagedContribution contribution);
  // As the rank's contribution, whatever else of it is staged.
  void put(StagedContribution contribution);

  // The contribution of exactly that origin; nullptr if there is none.
  const StagedContribution* find(const Origin& origin) const;

  // Drops what the members staged up to their decided round, and what earlier lives of them left.
  void release(const Decision& decision);

  size_t num_bytes() const;
  // Ascending by rank.
  const std::vector<StagedContribution>& all() const { return by_rank_; }

 private:
  // Where the rank's contribution is, or would be.
  size_t position(uint32_t rank) const;

  std::vector<StagedContribution> by_rank_;  // ascending by origin.rank
};

}  // namespace psstore
