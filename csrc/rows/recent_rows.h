// Rows of a client, by id and of a bounded number: where there is no room for new ones those go that were used longest ago,
// as rows of a table that are evicted by "lru".
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "rows/row_policy.h"
#include "rows/row_store.h"

namespace psstore {

class RecentRows {
 public:
  // Of so many float32, and as many of state. `evicted_part`: as a RowPolicy has it. REQUIRES: max_rows in [1, kMaxRows].
  RecentRows(uint32_t dim, uint32_t state_elems, size_t max_rows,
             uint64_t evicted_part = kEvictedPart);

  const RowStore& store() const { return store_; }
  size_t max_rows() const { return policy_.most_new(0); }

  // The row of each id, of which none comes twice, with memory of its own: a new one is zeros. Of more than max_rows the
  // last new ones are kRefusedRow. They are all used now, and have other numbers the next time. Throws
  // Error(OUT_OF_MEMORY), with nothing changed but that some may have gone.
  std::vector<RowNumber> rows_for(std::span<const uint64_t> ids);
  std::byte* value(RowNumber row) { return store_.value(row); }
  // The row is used now.
  void use(RowNumber row) { use(row, num_uses_); }
  // How many calls of rows_for() ago the row was used.
  uint32_t age(RowNumber row) const { return static_cast<uint32_t>(num_uses_) - store_.usage(row); }
  // A new row that was used so many calls ago. Throws Error(OUT_OF_MEMORY). REQUIRES: there are none but such rows, none of
  // that id, and there is room.
  RowNumber load(uint64_t id, uint32_t age);

 private:
  void use(RowNumber row, uint64_t when) {
    store_.set_usage(row, policy_.used(store_.usage(row), when));
  }

  RowStore store_;
  RowPolicy policy_;
  uint64_t num_uses_ = 0;
};

}  // namespace psstore
