// Which parts of a range of addresses are free: first fit, and neighbours that are free are one hole.
//
// Not thread-safe.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>

namespace psstore {

class Holes {
 public:
  // Where so many bytes are taken; empty: no hole is large enough.
  std::optional<uint64_t> take(size_t num_bytes) {
    const auto hole = std::find_if(holes_.begin(), holes_.end(), [num_bytes](const auto& one) {
      return one.second >= num_bytes;
    });
    if (hole == holes_.end()) return std::nullopt;
    const auto [begin, room] = *hole;
    if (room > num_bytes) holes_.emplace(begin + num_bytes, room - num_bytes);
    holes_.erase(hole);
    return begin;
  }

  // They are free, again or from now on.
  void give_back(uint64_t begin, size_t num_bytes) {
    const auto after = holes_.find(begin + num_bytes);
    if (after != holes_.end()) {
      num_bytes += after->second;
      holes_.erase(after);
    }
    const auto next = holes_.lower_bound(begin);
    if (next != holes_.begin() && std::prev(next)->first + std::prev(next)->second == begin) {
      std::prev(next)->second += num_bytes;
    } else {
      holes_.emplace(begin, num_bytes);
    }
  }

  // Whether exactly these bytes are one hole.
  bool is_hole(uint64_t begin, size_t num_bytes) const {
    const auto hole = holes_.find(begin);
    return hole != holes_.end() && hole->second == num_bytes;
  }
  // The hole is no part of the range any more. REQUIRES: one begins there.
  void remove(uint64_t begin) { holes_.erase(begin); }

  size_t num_bytes() const {
    size_t sum = 0;
    for (const auto& [begin, size] : holes_) sum += size;
    return sum;
  }

 private:
  std::map<uint64_t, size_t> holes_;  // bytes by begin
};

}  // namespace psstore
