// A set of ids that are given out in ascending order and come to an end in about that order: neighbours are
// one range, so that it takes memory for its gaps and not for its ids.
//
// Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>

namespace psstore {

class IdRanges {
 public:
  bool contains(uint64_t id) const {
    const auto after = ranges_.upper_bound(id);
    return after != ranges_.begin() && id <= std::prev(after)->second;
  }

  void insert(uint64_t id) {
    if (contains(id)) return;
    const auto after = ranges_.upper_bound(id);
    const bool continues = after != ranges_.begin() && std::prev(after)->second + 1 == id;
    const auto range = continues ? std::prev(after) : ranges_.emplace_hint(after, id, id);
    range->second = id;
    if (after != ranges_.end() && after->first - 1 == id) {
      range->second = after->second;
      ranges_.erase(after);
    }
  }

  size_t num_ranges() const { return ranges_.size(); }
  // (first, last) of each, ascending.
  const std::map<uint64_t, uint64_t>& ranges() const { return ranges_; }
  // REQUIRES: neither touches what is there.
  void insert_range(uint64_t first, uint64_t last) { ranges_.emplace(first, last); }

 private:
  std::map<uint64_t, uint64_t> ranges_;  // last by first; they don't touch
};

}  // namespace psstore
