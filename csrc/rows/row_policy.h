// Who becomes a row of a partition, and which rows make room: its bound, eviction and admission together.
//
// All of it follows from the partition's records, from what admission has counted, and from the decision: nothing else is
// looked at, neither a clock nor the order in which records lie. Guarded as the rows are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "rows/admission.h"
#include "rows/contribution.h"
#include "rows/eviction.h"
#include "rows/row_store.h"

namespace psstore {

// In place of a row's number: the id has no row, and gets none.
inline constexpr RowNumber kRefusedRow = kNoRow - 1;

// Those of the ids that are to become rows.
std::vector<uint64_t> new_ids(std::span<const uint64_t> ids, std::span<const RowNumber> rows);

// Of a partition that is full, a sixteenth of its bound goes at once.
inline constexpr uint64_t kEvictedPart = 16;

class RowPolicy {
 public:
  // `seed`: the table's. `evicted_part`: what goes at once of who is full, as a part of the bound.
  RowPolicy(const RowBounds& bounds, uint64_t seed, uint64_t evicted_part = kEvictedPart);

  // ---- whether a contribution may be staged

  // Whether rows that are not there would find room: a push to a table that is full and evicts nothing is refused, and not
  // the decision on it.
  bool has_room(size_t num_rows, size_t num_new) const;
  // How many rows can be added to so many, without evicting any.
  size_t most_new(size_t num_rows) const;

  // ---- what a decision does: admit(), make_room(), made_room(), count(), of which the last two can't fail

  // Refuses ids that have no row and are to have none yet.
  void admit(const MergedRows& merged, std::span<RowNumber> rows, uint64_t decision,
             const std::byte* counted) const;

  struct Plan {
    std::vector<size_t> victims = {};  // places of rows that go, ascending
    uint64_t next_due = 0;
    size_t num_refused = 0;  // by the bound, even if all others went
  };
  // Which rows go, so that the new ones among `rows` find room; of `rows` itself none goes. Refuses the last new ones if
  // there is no room even so.
  Plan make_room(const RowStore& store, std::span<RowNumber> rows, uint64_t decision) const;
  // The plan was carried out.
  void made_room(const Plan& plan);
  // Of ids without rows, before they are made. `counted`: admission's bytes, which may be changed.
  void count(const MergedRows& merged, std::span<const RowNumber> rows, std::byte* counted);
  size_t counted_bytes() const { return admission_ ? admission_->counted_bytes() : 0; }

  // The usage of a row that changes.
  uint32_t used(uint32_t before, uint64_t decision) const {
    return eviction_ ? eviction_->used(before, decision) : 0;
  }

  // Since this process began: rows, and contributions to ids that stayed without one.
  uint64_t num_evicted() const { return num_evicted_; }
  uint64_t num_refused() const { return num_refused_; }

 private:
  // Rows that go: as many as are needed, and some more, for to look for them costs a look at each; and those whose time
  // is over.
  Plan choose(const RowStore& store, std::span<const RowNumber> rows, size_t num_needed,
              uint64_t decision) const;

  const RowBounds bounds_;
  const uint64_t evicted_part_;
  const std::unique_ptr<const Eviction> eviction_;    // null: nothing goes
  const std::unique_ptr<const Admission> admission_;  // null: all are admitted
  uint64_t next_due_ = 0;                             // no row has to go before that decision
  uint64_t num_evicted_ = 0;
  uint64_t num_refused_ = 0;
};

}  // namespace psstore
