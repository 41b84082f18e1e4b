// A lock and the slots behind it. A key belongs to one stripe, by its hash.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "core/mutex.h"
#include "table/slot_index.h"

namespace psstore {

// Aligned so that two locks never share a cache line.
struct alignas(64) Stripe {
  Mutex mutex;
  std::unordered_map<Key, Slot> slots GUARDED_BY(mutex);  // found by the table's index
};

class Stripes {
 public:
  // `count` >= 1.
  explicit Stripes(size_t count) : stripes_(count) {}

  Stripe& of(Key key) { return stripes_[hash_of(key) % stripes_.size()]; }

  auto begin() { return stripes_.begin(); }
  auto end() { return stripes_.end(); }

 private:
  std::vector<Stripe> stripes_;
};

}  // namespace psstore
