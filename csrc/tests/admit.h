// What a shard's connection does with a payload that is announced.
#pragma once

#include <span>

#include "shard/shard.h"

namespace psstore::testing {

// Memory for it; empty if it is not worth receiving.
inline BufferRef admit(Shard& shard, WriteKind kind, std::span<SliceEntry> entries,
                       uint64_t payload_bytes) {
  return shard.check(kind, entries, payload_bytes) ? shard.allocate(payload_bytes) : BufferRef();
}

}  // namespace psstore::testing
