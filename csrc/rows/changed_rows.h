// What comes of rows that a reader keeps: those that may have changed since it read them.
//
//   | marks: u64 | change: u32 | comes: ⌈n / 32⌉ × u32 | rows |        of n ids
//
//   marks    the number of the partition's (row_marks.h); 0: there are none, all rows come, and none of them is to be kept
//   change   that these rows are as of
//   comes    bit i mod 32 of word i / 32: the row of id i is among the rows, which are in the order of the ids; else it is
//            as the reader has it
//
// No alignment of rows but that of words.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "rows/row_index.h"
#include "rows/row_marks.h"

namespace psstore {

inline constexpr size_t kChangedRowsHeadBytes = sizeof(uint64_t) + sizeof(uint32_t);

constexpr size_t num_coming_words(size_t num_ids) {
  return (num_ids + 31) / 32;
}
// All before the rows.
constexpr size_t changed_rows_head_bytes(size_t num_ids) {
  return kChangedRowsHeadBytes + num_coming_words(num_ids) * sizeof(uint32_t);
}

// What a reader has of rows of a partition.
struct KeptRows {
  uint64_t marks = 0;  // the number of those that its changes are of
  std::span<const uint32_t>
      changes;  // of each id, the change that the row is as of, or RowMarks::kNever
};

// Writes all before the rows, and returns the ids of those that come. `marks`: null: there are none.
inline std::vector<uint64_t> begin_changed_rows(std::span<const uint64_t> ids, const KeptRows& kept,
                                                const RowMarks* marks, std::byte* to) {
  const uint64_t number = marks != nullptr ? marks->number() : 0;
  const uint32_t change = marks != nullptr ? marks->change() : RowMarks::kNever;
  std::memcpy(to, &number, sizeof number);
  std::memcpy(to + sizeof number, &change, sizeof change);
  std::vector<uint32_t> comes(num_coming_words(ids.size()));
  std::vector<uint64_t> coming;
  const bool knows = marks != nullptr && kept.marks == number;
  for (size_t i = 0; i < ids.size(); ++i) {
    const uint32_t since = kept.changes[i];
    const bool is_there =
        knows && since != RowMarks::kNever && !marks->may_have_changed(hash_of_id(ids[i]), since);
    if (is_there) continue;
    comes[i / 32] |= 1U << i % 32;
    coming.push_back(ids[i]);
  }
  if (!comes.empty()) {
    std::memcpy(to + kChangedRowsHeadBytes, comes.data(), comes.size() * sizeof(uint32_t));
  }
  return coming;
}

// The same, as the reader has it.
class ChangedRows {
 public:
  ChangedRows(std::span<const std::byte> bytes, size_t num_ids, size_t row_bytes)
      : bytes_(bytes), num_ids_(num_ids), row_bytes_(row_bytes) {}

  // Whether it can be what comes of so many ids. REQUIRES: true, for all of the following.
  bool is_whole() const {
    const size_t head = changed_rows_head_bytes(num_ids_);
    if (bytes_.size() < head) return false;
    size_t num_coming = 0;
    for (size_t word = 0; word < num_coming_words(num_ids_); ++word) {
      num_coming += static_cast<size_t>(std::popcount(coming(word)));
    }
    const size_t last = num_ids_ % 32;
    const bool fits = last == 0 || coming(num_ids_ / 32) >> last == 0;
    return fits && bytes_.size() == head + num_coming * row_bytes_;
  }
  uint64_t marks() const { return read<uint64_t>(0); }
  uint32_t change() const { return read<uint32_t>(sizeof(uint64_t)); }
  bool comes(size_t i) const { return (coming(i / 32) >> i % 32 & 1U) != 0; }
  const std::byte* rows() const { return bytes_.data() + changed_rows_head_bytes(num_ids_); }

 private:
  template <typename T>
  T read(size_t offset) const {
    T value;
    std::memcpy(&value, bytes_.data() + offset, sizeof value);
    return value;
  }
  uint32_t coming(size_t word) const {
    return read<uint32_t>(kChangedRowsHeadBytes + word * sizeof(uint32_t));
  }

  std::span<const std::byte> bytes_;
  size_t num_ids_;
  size_t row_bytes_;
};

}  // namespace psstore
