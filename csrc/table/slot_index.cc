#include "table/slot_index.h"

#include <utility>

namespace psstore {

void SlotIndex::insert(Key key, Slot* slot) {
  if (2 * (num_slots_ + 1) > places_.size()) grow();
  places_[position_of(key)] = {key, slot};
  ++num_slots_;
}

void SlotIndex::grow() {
  const std::vector<Place> before = std::exchange(places_, std::vector<Place>(2 * places_.size()));
  for (const Place& place : before) {
    if (place.slot != nullptr) places_[position_of(place.key)] = place;
  }
}

// Closes the gap: whoever behind it would be found at the gap as well goes there, and leaves the next.
void SlotIndex::erase(Key key) {
  size_t gap = position_of(key);
  for (size_t next = (gap + 1) & mask(); places_[next].slot != nullptr;
       next = (next + 1) & mask()) {
    const size_t home = hash_of(places_[next].key) & mask();
    if (((next - home) & mask()) < ((next - gap) & mask())) continue;  // its home is behind the gap
    places_[gap] = places_[next];
    gap = next;
  }
  places_[gap] = {};
  --num_slots_;
}

}  // namespace psstore
