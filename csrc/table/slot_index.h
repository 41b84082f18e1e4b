// Where the slot of a key is: a look-up touches one cache line, mostly, and nothing of other slots.
//
// Open addressing with linear probing, at most half full; who is erased leaves no mark, since those
// behind it move up (Knuth, TAOCP 3, section 6.4, algorithm R). Owns no slots.
// Guarded by the table's decision mutex: slots come and go under the exclusive lock only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "table/slot.h"

namespace psstore {

// Fibonacci hashing (same section): keys of one tensor differ in their low bits only, those of many small
// ones in their high bits only, and the high half of the product depends on all of them.
inline uint64_t hash_of(Key key) {
  constexpr uint64_t kGoldenRatio = 0x9E3779B97F4A7C15;
  return key * kGoldenRatio >> 32;
}

class SlotIndex {
 public:
  // nullptr if there is none.
  Slot* find(Key key) const { return places_[position_of(key)].slot; }
  // REQUIRES: there is none of that key. `slot` stays where it is until it is erased.
  void insert(Key key, Slot* slot);
  // REQUIRES: there is one.
  void erase(Key key);

 private:
  struct Place {
    Key key = 0;
    Slot* slot = nullptr;  // null: free
  };

  size_t mask() const { return places_.size() - 1; }
  // Where the key is, or where it would go.
  size_t position_of(Key key) const {
    size_t position = hash_of(key) & mask();
    while (places_[position].slot != nullptr && places_[position].key != key) {
      position = (position + 1) & mask();
    }
    return position;
  }
  void grow();

  std::vector<Place> places_ = std::vector<Place>(64);  // a power of two of them
  size_t num_slots_ = 0;
};

}  // namespace psstore
