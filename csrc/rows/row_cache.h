// Rows that a client has read, as they travelled, so that the next time those come alone that may have changed since.
//
//   row   | value: row_bytes, to a multiple of 4 | marks: u64 | change: u32 |       as of that change of those marks
//
// What a row is as of is said by its shard's marks (row_marks.h), and a row of others than were last heard of for its partition
// is none. Bounded: those go that were read longest ago. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "rows/changed_rows.h"
#include "rows/recent_rows.h"

namespace psstore {

class RowCache {
 public:
  // REQUIRES: row_bytes > 0, max_rows in [1, kMaxRows].
  RowCache(size_t row_bytes, size_t max_rows, size_t num_partitions);

  // What a row takes, but for its place in the index.
  static size_t record_bytes(size_t row_bytes);

  size_t row_bytes() const { return row_bytes_; }
  size_t num_rows() const { return rows_.store().num_rows(); }
  size_t num_partitions() const { return marks_.size(); }
  uint64_t marks_of(size_t partition) const { return marks_[partition]; }
  // Since it began: rows that were taken, and those of them that had not changed, and did not come.
  uint64_t num_taken() const { return num_taken_; }
  uint64_t num_unchanged() const { return num_unchanged_; }

  // Copies those that are here of ids of one partition to `rows`, (ids, row_bytes), and says of each id as of which change
  // of the partition's marks, or RowMarks::kNever.
  void read(size_t partition, std::span<const uint64_t> ids, std::byte* rows,
            uint32_t* changes) const;
  // Completes `rows`, which read() began, by what came for `changes`, and keeps them. None of the ids comes twice. False, with
  // nothing kept: no shard that was asked so answers so. Throws Error(OUT_OF_MEMORY), with nothing kept.
  bool take(size_t partition, std::span<const uint64_t> ids, std::span<const uint32_t> changes,
            std::span<const std::byte> came, std::byte* rows);

 private:
  uint32_t value_elems() const { return rows_.store().shape().dim; }
  void keep(RowNumber row, const ChangedRows& came, size_t i, uint32_t change,
            const std::byte* value);

  const size_t row_bytes_;
  RecentRows rows_;
  std::vector<uint64_t> marks_;  // of each partition, as heard of last
  uint64_t num_taken_ = 0;
  uint64_t num_unchanged_ = 0;
};

}  // namespace psstore
