// How many rows a table has in some of its partitions, and what has become of others.
#pragma once

#include <cstdint>

namespace psstore {

struct RowCounts {
  uint64_t num_rows = 0;
  uint64_t num_bytes = 0;  // of their records: ids, values and state
  uint64_t num_evicted = 0;
  uint64_t num_refused = 0;  // contributions to ids that stayed without a row

  RowCounts& operator+=(const RowCounts& other) {
    num_rows += other.num_rows;
    num_bytes += other.num_bytes;
    num_evicted += other.num_evicted;
    num_refused += other.num_refused;
    return *this;
  }
};

}  // namespace psstore
