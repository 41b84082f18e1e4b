#include "rows/hashed_marks.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace psstore {
namespace {

// A page of marks for a partition of few rows.
constexpr size_t kLeastMarks = 1024;

size_t wanted_marks(size_t num_rows) {
  return std::max(kLeastMarks, std::bit_ceil(num_rows));
}

}  // namespace

HashedMarks::HashedMarks(size_t num_rows, std::shared_ptr<MemoryBudget> budget)
    : budget_(std::move(budget)) {
  marks_.reserve(wanted_marks(num_rows));
  budget_->take(wanted_marks(num_rows) * sizeof(uint32_t));
  marks_.resize(wanted_marks(num_rows), 0);
}

// Keys that differ in the next bit alone had the same mark.
void HashedMarks::fit(size_t num_rows) {
  while (marks_.size() < wanted_marks(num_rows)) {
    const size_t num_marks = marks_.size();
    marks_.reserve(2 * num_marks);
    budget_->take(num_bytes());
    marks_.resize(2 * num_marks);
    std::copy_n(marks_.begin(), num_marks, marks_.begin() + static_cast<ptrdiff_t>(num_marks));
  }
}

}  // namespace psstore
