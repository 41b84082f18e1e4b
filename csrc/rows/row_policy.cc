#include "rows/row_policy.h"

#include <algorithm>
#include <tuple>

#include "core/breakable_rules.h"

namespace psstore {
namespace {

constexpr size_t less(size_t from, size_t what) {
  return from - std::min(from, what);
}

bool is_there(RowNumber row) {
  return row < kRefusedRow;
}

}  // namespace

std::vector<uint64_t> new_ids(std::span<const uint64_t> ids, std::span<const RowNumber> rows) {
  std::vector<uint64_t> found;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (rows[i] == kNoRow) found.push_back(ids[i]);
  }
  return found;
}

RowPolicy::RowPolicy(const RowBounds& bounds, uint64_t seed, uint64_t evicted_part)
    : bounds_(bounds),
      evicted_part_(evicted_part),
      eviction_(Eviction::make(bounds)),
      admission_(Admission::make(bounds, seed)) {}

size_t RowPolicy::most_new(size_t num_rows) const {
  return bounds_.max_rows == 0 ? kMaxRows : less(bounds_.max_rows, num_rows);
}

bool RowPolicy::has_room(size_t num_rows, size_t num_new) const {
  const size_t room = most_new(num_rows);
  return eviction_ || num_new <= room || (admission_ && room > 0);
}

void RowPolicy::admit(const MergedRows& merged, std::span<RowNumber> rows, uint64_t decision,
                      const std::byte* counted) const {
  if (!admission_) return;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] != kNoRow) continue;
    const size_t num_contributions = merged.gradients_of(i).size();
    if (!admission_->admits(merged.ids[i], num_contributions, decision, counted)) {
      rows[i] = kRefusedRow;
    }
  }
}

RowPolicy::Plan RowPolicy::make_room(const RowStore& store, std::span<RowNumber> rows,
                                     uint64_t decision) const {
  size_t num_new = 0;
  size_t num_refused = 0;
  const auto num_staying =
      eviction_ ? static_cast<size_t>(std::ranges::count_if(rows, is_there)) : store.num_rows();
  for (RowNumber& row : rows) {
    if (row != kNoRow) continue;
    if (num_new < most_new(num_staying)) {
      ++num_new;
    } else {
      row = kRefusedRow;
      ++num_refused;
    }
  }
  const size_t num_needed = less(num_new, most_new(store.num_rows()));
  const bool may_stay = num_needed == 0 && decision < next_due_;
  Plan plan{.next_due = next_due_};
  if (eviction_ && !may_stay) plan = choose(store, rows, num_needed, decision);
  plan.num_refused = num_refused;
  return plan;
}

RowPolicy::Plan RowPolicy::choose(const RowStore& store, std::span<const RowNumber> rows,
                                  size_t num_needed, uint64_t decision) const {
  struct Candidate {
    uint64_t worth;
    uint64_t id;
    size_t place;

    bool operator<(const Candidate& other) const {
      return std::tie(worth, id) < std::tie(other.worth, other.id);
    }
  };
  std::vector<bool> stays(store.num_rows());
  for (const RowNumber row : rows) {
    if (is_there(row)) stays[store.place_of(row)] = true;
  }
  std::vector<Candidate> candidates;
  size_t num_over = 0;
  uint64_t over_due = Eviction::kNever;
  uint64_t others_due =
      eviction_->due(used(0, decision), decision);  // that of rows which change now
  for (size_t place = 0; place < store.num_rows(); ++place) {
    if (stays[place]) continue;
    const RowNumber row = store.number(place);
    const uint32_t usage = store.usage(row);
    const uint64_t due = eviction_->due(usage, decision);
    const bool is_over = due <= decision + eviction_->grace();
    num_over += is_over;
    uint64_t& first_due = is_over ? over_due : others_due;
    first_due = std::min(first_due, due);
    const uint64_t worth =
        holds(BreakableRule::kEVICTION_IS_BY_DECISIONS) ? eviction_->worth(usage, decision) : place;
    candidates.push_back({worth, store.id_of(row), place});
  }
  const bool any_due = over_due <= decision;
  size_t num_victims = any_due ? num_over : 0;
  if (num_needed > 0) {
    num_victims = std::max({num_victims, num_needed, size_t{bounds_.max_rows / evicted_part_}});
  }
  num_victims = std::min(num_victims, candidates.size());
  Plan plan{.next_due = any_due ? others_due : std::min(over_due, others_due)};
  std::nth_element(candidates.begin(), candidates.begin() + static_cast<ptrdiff_t>(num_victims),
                   candidates.end());
  for (size_t i = 0; i < num_victims; ++i) plan.victims.push_back(candidates[i].place);
  std::ranges::sort(plan.victims);
  return plan;
}

void RowPolicy::made_room(const Plan& plan) {
  next_due_ = plan.next_due;
  num_evicted_ += plan.victims.size();
}

void RowPolicy::count(const MergedRows& merged, std::span<const RowNumber> rows,
                      std::byte* counted) {
  for (size_t i = 0; i < rows.size(); ++i) {
    if (is_there(rows[i])) continue;
    const size_t num_contributions = merged.gradients_of(i).size();
    if (rows[i] == kRefusedRow) num_refused_ += num_contributions;
    if (counted == nullptr) continue;
    const bool counts_all = holds(BreakableRule::kADMISSION_COUNTS_ALL);
    admission_->count(merged.ids[i], counts_all ? num_contributions : 1, counted);
  }
}

}  // namespace psstore
