// The slice descriptors of one frame: read in order, copied rarely, never changed in place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "core/types.h"
#include "wire/ops.h"

namespace psstore {

// Sum of num_bytes: 4096 × 4 GiB can't overflow it.
inline uint64_t total_bytes(std::span<const SliceEntry> entries) {
  uint64_t sum = 0;
  for (const SliceEntry& entry : entries) sum += entry.num_bytes;
  return sum;
}

// Whether an entry of a frame of that operation may be about this part of a slot.
constexpr bool may_be_about(Op op, uint16_t part) {
  switch (op) {
    case Op::kPULL:
    case Op::kPULLED:
    case Op::kRESTORE:
    case Op::kRESTORED: return part <= kMaxPart;
    case Op::kLIST_ROWS:  // ids, or records
    case Op::kLISTED_ROWS: return part <= 1;
    default: return part == 0;
  }
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

// Position of the first slice that failed.
inline std::optional<size_t> first_failure(const SliceTable& table) {
  for (size_t i = 0; i < table.size(); ++i) {
    if (is_failure(table[i].status)) return i;
  }
  return std::nullopt;
}

}  // namespace psstore
