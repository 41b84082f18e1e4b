// Which ids become rows of a partition when somebody contributes to them.
//
// A policy may count in bytes that belong to the partition, and that it reads before a decision and changes with it; they
// begin as zeros. So it is the same in a replay, on a standby and in any number of shards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "rows/row_bounds.h"

namespace psstore {

class Admission {
 public:
  // `seed`: the table's. Null: every id becomes a row.
  static std::unique_ptr<const Admission> make(const RowBounds& bounds, uint64_t seed);
  virtual ~Admission() = default;

  // Whether a decision with so many contributions to an id that has no row makes one. `counted`: null stands for zeros.
  virtual bool admits(uint64_t id, size_t num_contributions, uint64_t decision,
                      const std::byte* counted) const = 0;
  // Bytes that it counts in.
  virtual size_t counted_bytes() const { return 0; }
  virtual void count(uint64_t /*id*/, size_t /*num_contributions*/, std::byte* /*counted*/) const {}
};

}  // namespace psstore
