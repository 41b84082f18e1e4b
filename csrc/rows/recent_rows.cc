#include "rows/recent_rows.h"

#include <algorithm>

namespace psstore {
namespace {

AllocateMemory from_a_pool() {
  return [pool = BufferPool::create(0)](size_t num_bytes) { return pool->allocate(num_bytes); };
}

}  // namespace

RecentRows::RecentRows(uint32_t dim, uint32_t state_elems, size_t max_rows, uint64_t evicted_part)
    : store_({.dim = dim, .state_elems = state_elems, .has_usage = true}, FirstValues{},
             from_a_pool()),
      policy_({.max_rows = max_rows, .eviction = EvictionKind::kLeastRecent}, 0, evicted_part) {}

std::vector<RowNumber> RecentRows::rows_for(std::span<const uint64_t> ids) {
  ++num_uses_;
  std::vector<RowNumber> rows(ids.size());
  store_.find(ids, rows);
  const RowPolicy::Plan plan = policy_.make_room(store_, rows, num_uses_);
  if (!plan.victims.empty()) {
    store_.evict(plan.victims);
    for (size_t i = 0; i < ids.size(); ++i) {
      if (rows[i] != kRefusedRow) store_.find(ids.subspan(i, 1), {&rows[i], 1});
    }
  }
  policy_.made_room(plan);
  store_.reserve(new_ids(ids, rows));
  for (size_t i = 0; i < ids.size(); ++i) {
    if (rows[i] == kRefusedRow) continue;
    if (rows[i] == kNoRow) rows[i] = store_.add(ids[i], 0);
    use(rows[i]);
  }
  return rows;
}

RowNumber RecentRows::load(uint64_t id, uint32_t age) {
  if (store_.num_rows() == 0) num_uses_ = UINT32_MAX;  // so that no row was used before the first
  store_.reserve({&id, 1});
  const RowNumber row = store_.add(id, 0);
  use(row, num_uses_ - age);
  return row;
}

}  // namespace psstore
