// The slice descriptors of one frame: read in order, copied rarely, never changed in place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "core/types.h"

namespace psstore {

// Sum of num_bytes: 4096 × 4 GiB can't overflow it.
inline uint64_t total_bytes(std::span<const SliceEntry> entries) {
  uint64_t sum = 0;
  for (const SliceEntry& entry : entries) sum += entry.num_bytes;
  return sum;
}

class SliceTable {
 public:
  SliceTable() = default;
  explicit SliceTable(std::vector<SliceEntry> entries) : entries_(std::move(entries)) {}

  std::span<const SliceEntry> entries() const { return entries_; }
  size_t size() const { return entries_.size(); }
  bool empty() const { return entries_.empty(); }
  const SliceEntry& operator[](size_t position) const { return entries_[position]; }
  auto begin() const { return entries_.begin(); }
  auto end() const { return entries_.end(); }

  uint64_t payload_bytes() const { return total_bytes(entries_); }

  // The table as it goes on the wire.
  std::string_view wire_bytes() const {
    return {reinterpret_cast<const char*>(entries_.data()), entries_.size() * sizeof(SliceEntry)};
  }

 private:
  std::vector<SliceEntry> entries_;
};

}  // namespace psstore
