// At which decision the rows of a partition last changed: what a checkpoint goes by that has only those which changed since
// another one.
//
//   from      since this decision all changes are known; before it any row may have changed
//   marks     of each place of a row, how many decisions after `from` it last changed; 0: not since then
//
// So "changed since decision n" is a comparison, of which nobody need remember that it was made. A place's mark never becomes
// less, so that it says of rows that are kept as they were what it says of today's. Where there is no memory for marks, or their
// numbers are used up, what is known begins anew with the change at hand, and all rows count as changed before; where there is
// none for more of them, places share marks. A row that goes is told by its absence. Nothing of it is in a checkpoint, an image or
// a copy. Not thread-safe: guarded as the rows are.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "rows/hashed_marks.h"

namespace psstore {

class RowDecisions {
 public:
  // Of rows that are as they are since decision `from` at the latest.
  RowDecisions(uint64_t from, std::shared_ptr<MemoryBudget> budget)
      : from_(from), budget_(std::move(budget)) {}

  // The rows have come from elsewhere, as they were at that decision.
  void restart(uint64_t from) {
    marks_ = nullptr;
    from_ = from;
  }
  // Begins what that decision, or a write that comes before the next one, changes of so many rows, new ones included.
  void begin(uint64_t decision, size_t num_rows);
  // The row in that place changes or appears.
  void mark(size_t place) {
    if (marks_) marks_->set(place, number_);
  }
  // The row of one place takes another one, whose own is gone.
  void move(size_t from, size_t to) {
    if (marks_) marks_->set(to, std::max(marks_->of(from), marks_->of(to)));
  }
  // Whether the row in that place may be another than it was at that decision.
  bool may_have_changed(size_t place, uint64_t since) const {
    return since < from_ || (marks_ && marks_->of(place) > since - from_);
  }
  size_t num_bytes() const { return marks_ ? marks_->num_bytes() : 0; }

 private:
  uint64_t from_;
  const std::shared_ptr<MemoryBudget> budget_;
  uint32_t number_ = 0;                 // of the change at hand
  std::unique_ptr<HashedMarks> marks_;  // null: nothing has changed since `from_`
};

}  // namespace psstore
