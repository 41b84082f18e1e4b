// The rows of one partition of a table: records in slabs, and an index of them by id.
//
//   record   | id | value: dim × dtype | state: state_elems × float32 | usage: u32, if rows are evicted |
//
// Records lie without gaps in slabs (slabs.h), and one moves only when others are evicted: the last ones then take their
// places, and there is a new index. Slabs and index are shared beyond whoever guards the store: a snapshot holds references
// to them, and what is to be changed is copied first if somebody else holds it. So a change is in two parts: plan what is
// touched, which allocates, and may throw; then touch it, which can't fail.
//
// Not thread-safe: guarded, like the slot that it is in, by the lock of its stripe. Snapshots are anybody's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "rows/first_values.h"
#include "rows/row_index.h"
#include "rows/slabs.h"

namespace psstore {

inline constexpr size_t kIdBytes = sizeof(uint64_t);

struct RowShape {
  uint32_t dim = 1;
  uint32_t state_elems = 0;
  uint32_t sum_elems = 0;         // of the state, the first that are sums of squares
  bool has_usage = false;         // what eviction.h goes by
  DType dtype = DType::kFloat32;  // of the value: kFloat32 or kBFloat16

  size_t value_bytes() const { return dim * dtype_bytes(dtype); }
  size_t usage_offset() const { return kIdBytes + value_bytes() + state_elems * sizeof(float); }
  size_t record_bytes() const { return usage_offset() + (has_usage ? sizeof(uint32_t) : 0); }
};

// Rows of one partition: of their numbers some are not used.
inline constexpr size_t kMaxRows = size_t{1} << 31;

// The rows as they were once. Rows that were added to the index later have numbers from `end` on.
struct RowSnapshot {
  std::shared_ptr<const RowIndex> index;
  Slabs slabs;
  size_t num_rows = 0;
  RowNumber end = 0;
};

// A row that took the place of one that went.
struct MovedRow {
  size_t from;
  size_t to;
};

class RowStore {
 public:
  // `number`: of its index (row_index.h).
  RowStore(const RowShape& shape, const FirstValues& first_values, AllocateMemory allocate,
           uint64_t number = 0);

  const RowShape& shape() const { return shape_; }
  size_t num_rows() const { return num_rows_; }
  // Of records.
  size_t num_bytes() const { return num_rows_ * shape_.record_bytes(); }
  size_t index_bytes() const { return index_->num_bytes(); }

  // The row of each id; kNoRow: there is none. Looks ahead in memory for many at once.
  void find(std::span<const uint64_t> ids, std::span<RowNumber> rows) const;

  // Memory for rows of these ids, of which at most so many are new. Throws Error(OUT_OF_MEMORY), with no row changed.
  void reserve(std::span<const uint64_t> ids, size_t most_new = SIZE_MAX);
  // A row with its first values, and the state of begin_state(). REQUIRES: there is none of that id, and there is room.
  RowNumber add(uint64_t id, float sum);
  // Whether there is memory for rows of all these ids, if all are new.
  bool has_room(std::span<const uint64_t> ids) const {
    return num_rows_ + ids.size() <= slabs_.size() * layout_.rows_per_slab() &&
           index_->has_room(ids);
  }
  // Has rows go: those in these places, which ascend. Rows have other numbers then; of those that have another place,
  // returns both. Throws Error(OUT_OF_MEMORY), with no row changed.
  std::vector<MovedRow> evict(std::span<const size_t> places);
  // Has the row's slab be nobody else's. True: it is another one now. Throws Error(OUT_OF_MEMORY), with no row changed.
  bool make_writable(RowNumber row);

  const std::byte* record(RowNumber row) const {
    return slabs_.begin_of(layout_.slab_of(row)) + layout_.offset_of(row);
  }
  // Of value and state. REQUIRES: make_writable(), or added since the last snapshot.
  std::byte* value(RowNumber row) {
    return slabs_.begin_of(layout_.slab_of(row)) + layout_.offset_of(row) + kIdBytes;
  }
  // Has the row's state begin anew: its sums of squares with `sum`, all else with zeros. REQUIRES: as value().
  void begin_state(RowNumber row, float sum);
  // REQUIRES: it has sums.
  float first_sum(RowNumber row) const {
    float sum;
    std::memcpy(&sum, record(row) + kIdBytes + shape_.value_bytes(), sizeof sum);
    return sum;
  }
  // What the eviction policy keeps of a row. REQUIRES: the shape has it; to set it, as value().
  uint32_t usage(RowNumber row) const {
    uint32_t usage;
    std::memcpy(&usage, record(row) + shape_.usage_offset(), sizeof usage);
    return usage;
  }
  void set_usage(RowNumber row, uint32_t usage) {
    std::memcpy(value(row) - kIdBytes + shape_.usage_offset(), &usage, sizeof usage);
  }
  // Rows by their places, of which there are num_rows().
  RowNumber number(size_t place) const { return layout_.number(place); }
  size_t place_of(RowNumber row) const { return layout_.place_of(row); }
  uint64_t id_of(RowNumber row) const { return id_in(record(row)); }

  // Writes the value of each id in the shape's dtype, as it is, or was; its first value if it has, or had, no row.
  void read(std::span<const uint64_t> ids, std::byte* values) const { read(ids, values, nullptr); }
  void read(std::span<const uint64_t> ids, std::byte* values, const RowSnapshot* then) const;

  RowSnapshot snapshot() { return {index_, slabs_.lent(), num_rows_, layout_.number(num_rows_)}; }
  // Copies records [first, first + count) of a snapshot, in the order of their places.
  void copy(const RowSnapshot& from, size_t first, size_t count, std::byte* records) const;
  // Those in these places.
  void copy(const RowSnapshot& from, std::span<const uint32_t> places, std::byte* records) const;
  // Ids alone of those from `first` on.
  void copy_ids(const RowSnapshot& from, size_t first, size_t count, std::byte* ids) const;
  // Adds records that were copied elsewhere. Throws Error: BAD_ARGUMENT for an id that is here; OUT_OF_MEMORY. Some of
  // them may be here then.
  void load(std::span<const std::byte> records);

 private:
  // Rows below `end` in these slabs, and where they are.
  struct View {
    const RowIndex& index;
    const Slabs& slabs;
    RowNumber end;
  };
  View now() const { return {*index_, slabs_, layout_.number(num_rows_)}; }
  const std::byte* record(const View& of, RowNumber row) const {
    return of.slabs.begin_of(layout_.slab_of(row)) + layout_.offset_of(row);
  }
  // Calls `found` with the position of each id in turn, and its row. `num_bytes`: of the record that it looks at.
  template <typename Found>
  void look_up(const View& of, std::span<const uint64_t> ids, size_t num_bytes, Found found) const;
  static uint64_t id_in(const std::byte* record) {
    uint64_t id;
    std::memcpy(&id, record, sizeof id);
    return id;
  }
  RowNumber append(uint64_t id);
  void load_one(std::span<const std::byte> record);
  // Of rows of which each lies elsewhere still.
  std::shared_ptr<RowIndex> index_of(std::span<const RowNumber> come_from) const;
  // `record_of`: a row's record.
  template <typename RecordOf>
  static RowIndex::HashesOf hashes_by(RecordOf record_of);
  RowIndex::HashesOf hashes() const;

  const RowShape shape_;
  const SlabLayout layout_;
  const FirstValues first_values_;
  const AllocateMemory allocate_;
  const uint64_t number_;
  std::shared_ptr<RowIndex> index_;
  Slabs slabs_;
  size_t num_rows_ = 0;
};

}  // namespace psstore
