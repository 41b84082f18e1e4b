// A lock and the slots behind it. A key belongs to one stripe, by its hash.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "core/mutex.h"
#include "table/slot.h"

namespace psstore {

// Aligned so that two locks never share a cache line.
struct alignas(64) Stripe {
  Mutex mutex;
  std::unordered_map<Key, Slot> slots GUARDED_BY(mutex);

  // nullptr if there is none; valid while the lock is held.
  Slot* find(Key key) REQUIRES(mutex) {
    const auto found = slots.find(key);
    return found == slots.end() ? nullptr : &found->second;
  }
};

class Stripes {
 public:
  // `count` >= 1.
  explicit Stripes(size_t count) : stripes_(count) {}

  // Fibonacci hashing (Knuth, TAOCP 3, section 6.4): keys of one tensor differ in their low bits only,
  // and the high half of the product depends on all of them. The map behind it hashes by identity.
  Stripe& of(Key key) {
    constexpr uint64_t kGoldenRatio = 0x9E3779B97F4A7C15;
    return stripes_[(key * kGoldenRatio >> 32) % stripes_.size()];
  }

  auto begin() { return stripes_.begin(); }
  auto end() { return stripes_.end(); }

 private:
  std::vector<Stripe> stripes_;
};

}  // namespace psstore
