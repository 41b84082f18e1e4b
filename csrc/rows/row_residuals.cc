#include "rows/row_residuals.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "core/errors.h"

namespace psstore {
namespace {

AllocateMemory from_a_pool() {
  return [pool = BufferPool::create(0)](size_t num_bytes) { return pool->allocate(num_bytes); };
}

}  // namespace

RowResiduals::RowResiduals(uint32_t dim, size_t max_rows)
    : store_({.dim = dim, .has_usage = true}, FirstValues{}, from_a_pool()),
      policy_({.max_rows = max_rows, .eviction = EvictionKind::kLeastRecent}, 0) {}

void RowResiduals::read(std::span<const uint64_t> ids, float* residuals) const {
  store_.read(ids, reinterpret_cast<std::byte*>(residuals));
}

void RowResiduals::write(std::span<const uint64_t> ids, const float* residuals) {
  ++num_writes_;
  std::vector<RowNumber> rows(ids.size());
  store_.find(ids, rows);
  const RowPolicy::Plan plan = policy_.make_room(store_, rows, num_writes_);
  const auto are_refused = [&](size_t i) { return rows[i] == kRefusedRow; };
  if (!plan.victims.empty()) {
    store_.evict(plan.victims);
    for (size_t i = 0; i < ids.size(); ++i) {
      if (!are_refused(i)) store_.find(ids.subspan(i, 1), {&rows[i], 1});
    }
  }
  policy_.made_room(plan);
  store_.reserve(static_cast<size_t>(std::ranges::count(rows, kNoRow)));
  const size_t row_bytes = store_.shape().value_bytes();
  for (size_t i = 0; i < ids.size(); ++i) {
    if (are_refused(i)) continue;
    const RowNumber row = rows[i] == kNoRow ? store_.add(ids[i], 0) : rows[i];
    std::memcpy(store_.value(row), residuals + i * dim(), row_bytes);
    store_.set_usage(row, policy_.used(store_.usage(row), num_writes_));
  }
}

void RowResiduals::copy(uint64_t* ids, float* residuals, uint32_t* ages) const {
  for (size_t i = 0; i < num_rows(); ++i) {
    const RowNumber row = store_.number(i);
    ids[i] = store_.id_of(row);
    std::memcpy(residuals + i * dim(), store_.record(row) + kIdBytes, store_.shape().value_bytes());
    ages[i] = static_cast<uint32_t>(num_writes_) - store_.usage(row);
  }
}

void RowResiduals::load(std::span<const uint64_t> ids, const float* residuals,
                        const uint32_t* ages) {
  if (ids.size() > policy_.most_new(0)) {
    throw Error(ErrorCode::BAD_ARGUMENT, "residuals of " + std::to_string(ids.size()) +
                                             " rows; expected at most " +
                                             std::to_string(policy_.most_new(0)));
  }
  num_writes_ = UINT32_MAX;  // so that no row was written before the first
  store_.reserve(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    RowNumber row = kNoRow;
    store_.find(ids.subspan(i, 1), {&row, 1});
    if (row != kNoRow) {
      throw Error(ErrorCode::BAD_ARGUMENT,
                  "residuals have id " + std::to_string(ids[i]) + " twice");
    }
    row = store_.add(ids[i], 0);
    std::memcpy(store_.value(row), residuals + i * dim(), store_.shape().value_bytes());
    store_.set_usage(row, policy_.used(0, num_writes_ - ages[i]));
  }
}

}  // namespace psstore
