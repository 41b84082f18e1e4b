// What a call asks of slices, entry by entry.
#pragma once

#include <cstdint>
#include <span>

#include "core/types.h"

namespace psstore {

inline bool is_admitted(const SliceEntry& entry) {
  return entry.status == ErrorCode::OK;
}

inline uint64_t sum_of_bytes(std::span<const SliceEntry> entries) {
  uint64_t sum = 0;
  for (const SliceEntry& entry : entries) sum += entry.num_bytes;
  return sum;
}

}  // namespace psstore
