#include "rows/row_cache.h"

#include <cstring>

namespace psstore {
namespace {

constexpr size_t kMarksElems = 2;  // of a row's state, in which the change follows
constexpr size_t kStateElems = kMarksElems + 1;

constexpr uint32_t elems_of(size_t row_bytes) {
  return static_cast<uint32_t>((row_bytes + sizeof(float) - 1) / sizeof(float));
}

// A quarter: each row that is new costs a look at four, and a place in a new index for each of those that stay. With a
// sixteenth, as of tables, 4 % less came, and pulls took twice the processor time (bench/row_caches.py).
constexpr uint64_t kEvictedAtOnce = 4;

struct AsOf {
  uint64_t marks = 0;
  uint32_t change = RowMarks::kNever;
};

AsOf as_of(const std::byte* state) {
  AsOf of;
  std::memcpy(&of.marks, state, sizeof of.marks);
  std::memcpy(&of.change, state + sizeof of.marks, sizeof of.change);
  return of;
}

void set_as_of(std::byte* state, const AsOf& of) {
  std::memcpy(state, &of.marks, sizeof of.marks);
  std::memcpy(state + sizeof of.marks, &of.change, sizeof of.change);
}

}  // namespace

RowCache::RowCache(size_t row_bytes, size_t max_rows, size_t num_partitions)
    : row_bytes_(row_bytes),
      rows_(elems_of(row_bytes), kStateElems, max_rows, kEvictedAtOnce),
      marks_(num_partitions) {}

size_t RowCache::record_bytes(size_t row_bytes) {
  const RowShape shape{.dim = elems_of(row_bytes), .state_elems = kStateElems, .has_usage = true};
  return shape.record_bytes();
}

void RowCache::read(size_t partition, std::span<const uint64_t> ids, std::byte* rows,
                    uint32_t* changes) const {
  std::vector<RowNumber> found(ids.size());
  rows_.store().find(ids, found);
  for (size_t i = 0; i < ids.size(); ++i) {
    changes[i] = RowMarks::kNever;
    if (found[i] == kNoRow) continue;
    const std::byte* const value = rows_.store().record(found[i]) + kIdBytes;
    const AsOf of = as_of(value + value_elems() * sizeof(float));
    if (of.marks != marks_[partition]) continue;
    changes[i] = of.change;
    std::memcpy(rows + i * row_bytes_, value, row_bytes_);
  }
}

bool RowCache::take(size_t partition, std::span<const uint64_t> ids,
                    std::span<const uint32_t> changes, std::span<const std::byte> bytes,
                    std::byte* rows) {
  const ChangedRows came(bytes, ids.size(), row_bytes_);
  if (!came.is_whole()) return false;
  const std::byte* from = came.rows();
  size_t num_unchanged = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (came.comes(i)) {
      std::memcpy(rows + i * row_bytes_, from, row_bytes_);
      from += row_bytes_;
    } else if (changes[i] == RowMarks::kNever) {
      return false;
    } else {
      ++num_unchanged;
    }
  }
  num_taken_ += ids.size();
  num_unchanged_ += num_unchanged;
  if (came.marks() == 0) return true;
  const std::vector<RowNumber> kept = rows_.rows_for(ids);
  marks_[partition] = came.marks();
  for (size_t i = 0; i < ids.size(); ++i) {
    if (kept[i] != kRefusedRow) keep(kept[i], came, i, changes[i], rows + i * row_bytes_);
  }
  return true;
}

// Another pull may have brought the row meanwhile, as of an earlier change or of a later one, or others may have had it go.
void RowCache::keep(RowNumber row, const ChangedRows& came, size_t i, uint32_t change,
                    const std::byte* value) {
  std::byte* const to = rows_.value(row);
  std::byte* const state = to + value_elems() * sizeof(float);
  const AsOf of = as_of(state);
  const bool are_same_marks = of.marks == came.marks();
  if (are_same_marks && of.change >= came.change()) return;
  const bool is_there = are_same_marks && of.change >= change && !came.comes(i);
  if (!is_there) std::memcpy(to, value, row_bytes_);
  set_as_of(state, {came.marks(), came.change()});
}

}  // namespace psstore
