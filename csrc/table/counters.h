// Counts of what happened in a shard since it began: for operators and tests, never for decisions.
#pragma once

#include <atomic>
#include <cstdint>

#include "table/slot.h"

namespace psstore {

// One event each; relaxed, since nobody draws conclusions from two of them together.
class Counter {
 public:
  void add(uint64_t count = 1) { count_.fetch_add(count, std::memory_order_relaxed); }
  uint64_t value() const { return count_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> count_{0};
};

struct Counters {
  Counter pushes;  // slices staged
  Counter pulls;   // slices read, whatever the answer
  Counter writes;  // slices assigned or added to
  Counter
      received_bytes;  // of values that may be written: pushed, assigned, added, restored; as they travel
  Counter sent_bytes;   // of values read: sent, or shown in shared memory
  Counter initialised;  // slices that got their first value from outside
  Counter duplicates;   // slices acknowledged and ignored
  Counter refused;      // slices answered with an error
  Counter decisions;    // decisions applied
  Counter skipped;      // of them, those that said skip
  Counter missing;      // slices that a decision named for a member who had not pushed them
  Counter applied_in_place;
  Counter applied_out_of_place;

  void count(Change change) {
    if (change == Change::kInPlace) applied_in_place.add();
    if (change == Change::kOutOfPlace) applied_out_of_place.add();
  }
};

}  // namespace psstore
