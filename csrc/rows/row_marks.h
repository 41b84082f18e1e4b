// Which rows of a partition may have changed since somebody read them: what is told to readers that keep rows.
//
//   changes   1, 2, 3, ... of the partition, counted since the marks were begun
//   marks     the last change to a row of each id, as hashed_marks.h keeps it
//
// A row that was read at change c is what it was while its mark is not above c. Ids that share a mark are said to have
// changed together, which costs a row that is sent in vain; a change that is not told there is none. An id needs no row
// to have a mark: a first value that nobody has trained stays what it is, and a row that is evicted has changed.
//
// Marks are memory of this process and of this partition, and are in no checkpoint, image or copy of it. They have a number
// that is drawn by lot: what somebody remembers of others, of a process that led before or of a store that has gone back,
// does not meet them. Guarded as the rows are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "rows/hashed_marks.h"

namespace psstore {

class RowMarks {
 public:
  // In place of a change: none.
  static constexpr uint32_t kNever = 0;

  // Of a partition of so many rows, 4 to 8 bytes for each, out of the budget. Throws Error(OUT_OF_MEMORY).
  RowMarks(size_t num_rows, std::shared_ptr<MemoryBudget> budget);

  // Not 0.
  uint64_t number() const { return number_; }
  // The last one, from 1 on: what is read now is as of it.
  uint32_t change() const { return change_; }

  // Begins the next change. False: there are no numbers left, and these marks are to be begun anew.
  bool go_on() { return ++change_ != UINT32_MAX; }
  // The row of an id of that hash changes, appears or goes.
  void mark(uint64_t hash) { marks_.set(hash, change_); }
  bool may_have_changed(uint64_t hash, uint32_t since) const { return marks_.of(hash) > since; }

  // Has as many marks as so many rows want. Throws Error(OUT_OF_MEMORY), and stays as it is.
  void fit(size_t num_rows) { marks_.fit(num_rows); }

  size_t num_bytes() const { return marks_.num_bytes(); }

 private:
  const uint64_t number_;
  uint32_t change_ = 1;
  HashedMarks marks_;
};

}  // namespace psstore
