// A number for each row of a partition, by the low bits of a key, out of a budget. The key is the row's place, or its id's hash.
//
//   marks     | 0 | 3 | 0 | 1 | ...   by the low bits of a key: the last number that was set for any such key
//
// Keys that share a mark share its number: hashes may, and places where there are fewer marks than rows. Not thread-safe:
// guarded as the rows are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/memory_budget.h"

namespace psstore {

class HashedMarks {
 public:
  // All 0. For so many rows, 4 to 8 bytes for each, out of the budget. Throws Error(OUT_OF_MEMORY).
  HashedMarks(size_t num_rows, std::shared_ptr<MemoryBudget> budget);
  ~HashedMarks() { budget_->give_back(num_bytes()); }
  HashedMarks(const HashedMarks&) = delete;
  HashedMarks& operator=(const HashedMarks&) = delete;

  void set(uint64_t key, uint32_t number) { marks_[key & (marks_.size() - 1)] = number; }
  uint32_t of(uint64_t key) const { return marks_[key & (marks_.size() - 1)]; }

  // Has as many marks as so many rows want. Throws Error(OUT_OF_MEMORY), and stays as it is.
  void fit(size_t num_rows);

  size_t num_bytes() const { return marks_.size() * sizeof(uint32_t); }

 private:
  const std::shared_ptr<MemoryBudget> budget_;
  std::vector<uint32_t> marks_;  // as many as a power of two
};

}  // namespace psstore
