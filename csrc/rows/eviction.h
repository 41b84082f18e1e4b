// Which rows of a partition go when others need their place, or after a while.
//
// A policy reads and writes one word of 32 bits that each record has, its usage, and counts in decisions: so a replay, a
// standby and any number of shards evict the same rows. The order is that of worth, then of ids.
#pragma once

#include <cstdint>
#include <memory>

#include "rows/row_bounds.h"

namespace psstore {

class Eviction {
 public:
  static constexpr uint64_t kNever = UINT64_MAX;

  // Null: nothing is evicted.
  static std::unique_ptr<const Eviction> make(const RowBounds& bounds);
  virtual ~Eviction() = default;

  // The usage of a row that the decision changes; `before`: 0 of one that it makes.
  virtual uint32_t used(uint32_t before, uint64_t decision) const = 0;
  // Rows of the least worth go first.
  virtual uint64_t worth(uint32_t usage, uint64_t decision) const = 0;
  // The decision at which the row has to go, though there is room.
  virtual uint64_t due(uint32_t /*usage*/, uint64_t /*decision*/) const { return kNever; }
  // So many decisions before that it goes with others that have to.
  virtual uint64_t grace() const { return 0; }
};

}  // namespace psstore
