#include "rows/row_store.h"

#include <algorithm>
#include <array>
#include <string>

#include "core/breakable_rules.h"
#include "core/errors.h"

namespace psstore {
namespace {

// So many ids ahead a row's place in the index is fetched from memory, later where its slab begins, and then its record:
// each needs what was fetched before it, and together they are as many cache misses as a core keeps under way.
constexpr size_t kIdsAhead = 32;
constexpr size_t kSlabsAhead = 20;
constexpr size_t kRecordsAhead = 12;

// Rows for which memory is taken at once, where many come.
constexpr size_t kAddedTogether = 4096;

}  // namespace

RowStore::RowStore(const RowShape& shape, const FirstValues& first_values, AllocateMemory allocate,
                   uint64_t number)
    : shape_(shape),
      layout_(shape.record_bytes()),
      first_values_(first_values),
      allocate_(std::move(allocate)),
      number_(number),
      index_(std::make_shared<RowIndex>(allocate_, number)) {}

template <typename RecordOf>
RowIndex::HashesOf RowStore::hashes_by(RecordOf record_of) {
  return [record_of](std::span<const RowNumber> rows, std::span<uint64_t> hashes) {
    for (size_t i = 0; i < rows.size() + kRecordsAhead; ++i) {
      if (i < rows.size()) __builtin_prefetch(record_of(rows[i]));
      if (i < kRecordsAhead) continue;
      hashes[i - kRecordsAhead] = hash_of_id(id_in(record_of(rows[i - kRecordsAhead])));
    }
  };
}

RowIndex::HashesOf RowStore::hashes() const {
  return hashes_by([this](RowNumber row) { return record(row); });
}

template <typename Found>
void RowStore::look_up(const View& of, std::span<const uint64_t> ids, size_t num_bytes,
                       Found found) const {
  struct Wanted {
    uint64_t hash;
    row_index::LikelyRows likely;
  };
  std::array<Wanted, 2 * kIdsAhead> wanted{};  // of the ids that are under way
  const auto is_row = [&](RowNumber row, uint64_t id) {
    return row < of.end && id_in(record(of, row)) == id;
  };
  for (size_t i = 0; i < ids.size() + kIdsAhead; ++i) {
    if (i < ids.size()) {
      Wanted& next = wanted[i % wanted.size()];
      next.hash = hash_of_id(ids[i]);
      of.index.fetch(next.hash);
    }
    if (const size_t at = i - (kIdsAhead - kSlabsAhead); at < ids.size()) {
      Wanted& next = wanted[at % wanted.size()];
      next.likely = of.index.likely(next.hash);
      for (const RowNumber row : {next.likely.first, next.likely.second}) {
        if (row < of.end) of.slabs.fetch_begin_of(layout_.slab_of(row));
      }
    }
    if (const size_t at = i - (kIdsAhead - kRecordsAhead); at < ids.size()) {
      const auto& [first, second] = wanted[at % wanted.size()].likely;
      if (first < of.end) fetch_lines(record(of, first), num_bytes);
      if (second < of.end) fetch_lines(record(of, second), num_bytes);
    }
    if (i < kIdsAhead) continue;
    const uint64_t id = ids[i - kIdsAhead];
    const Wanted& now = wanted[(i - kIdsAhead) % wanted.size()];
    found(i - kIdsAhead, is_row(now.likely.first, id) ? now.likely.first
                                                      : of.index.find(now.hash, [&](RowNumber row) {
                                                          return is_row(row, id);
                                                        }));
  }
}

void RowStore::find(std::span<const uint64_t> ids, std::span<RowNumber> rows) const {
  look_up(now(), ids, layout_.record_bytes(), [&](size_t i, RowNumber row) { rows[i] = row; });
}

void RowStore::reserve(std::span<const uint64_t> ids, size_t most_new) {
  const size_t num_more = std::min(ids.size(), most_new);
  if (num_more > kMaxRows - num_rows_) {
    throw Error(ErrorCode::OUT_OF_MEMORY, "a partition of a table has " +
                                              std::to_string(num_rows_) + " rows, and is to have " +
                                              std::to_string(num_more) + " more; at most " +
                                              std::to_string(kMaxRows) + " can be in one");
  }
  if (num_more == 0) return;
  index_->reserve(ids, hashes());
  const size_t num_slabs = layout_.num_slabs(num_rows_ + num_more);
  while (slabs_.size() < num_slabs) slabs_.add(allocate_(layout_.slab_bytes()));
}

RowNumber RowStore::append(uint64_t id) {
  const RowNumber row = layout_.number(num_rows_++);
  std::memcpy(value(row) - kIdBytes, &id, sizeof id);
  index_->insert(hash_of_id(id), row);
  return row;
}

RowNumber RowStore::add(uint64_t id, float sum) {
  const RowNumber row = append(id);
  write_first_values(first_values_, id, shape_.dim, shape_.dtype, value(row));
  begin_state(row, sum);
  if (shape_.has_usage) set_usage(row, 0);
  return row;
}

void RowStore::begin_state(RowNumber row, float sum) {
  std::byte* const states = value(row) + shape_.value_bytes();
  for (size_t i = 0; i < shape_.state_elems; ++i) {
    const float state = i < shape_.sum_elems ? sum : 0.0F;
    std::memcpy(states + i * sizeof state, &state, sizeof state);
  }
}

// The last rows go to the holes that others leave, and there is an index of all as they lie then.
std::vector<MovedRow> RowStore::evict(std::span<const size_t> places) {
  const size_t num_left = num_rows_ - places.size();
  const size_t num_holes =
      static_cast<size_t>(std::ranges::lower_bound(places, num_left) - places.begin());
  const std::span<const size_t> holes = places.first(num_holes);
  std::vector<RowNumber> come_from;  // of each place that is left, the row that will be there
  come_from.reserve(num_left);
  for (size_t place = 0; place < num_left; ++place) come_from.push_back(layout_.number(place));
  std::span<const size_t> going = places.subspan(num_holes);
  std::vector<MovedRow> moved;
  moved.reserve(holes.size());
  size_t last = num_left;
  for (const size_t hole : holes) {
    for (; !going.empty() && going.front() == last; ++last) going = going.subspan(1);
    come_from[hole] = layout_.number(last);
    moved.push_back({.from = last++, .to = hole});
  }
  std::shared_ptr<RowIndex> index = index_of(come_from);
  for (const size_t hole : holes) make_writable(layout_.number(hole));
  // New rows come behind the last one, in its slab.
  if (num_left > 0) make_writable(layout_.number(num_left - 1));

  for (const size_t hole : holes) {
    std::memcpy(value(layout_.number(hole)) - kIdBytes, record(come_from[hole]),
                layout_.record_bytes());
  }
  num_rows_ = num_left;
  slabs_.shrink(layout_.num_slabs(num_left));
  index_ = std::move(index);
  return moved;
}

std::shared_ptr<RowIndex> RowStore::index_of(std::span<const RowNumber> come_from) const {
  auto index = std::make_shared<RowIndex>(allocate_, number_);
  const RowIndex::HashesOf hashes =
      hashes_by([&](RowNumber row) { return record(come_from[place_of(row)]); });
  std::vector<uint64_t> ids;
  for (size_t first = 0; first < come_from.size(); first += ids.size()) {
    const std::span<const RowNumber> next =
        come_from.subspan(first, std::min(kAddedTogether, come_from.size() - first));
    ids.clear();
    for (const RowNumber row : next) ids.push_back(id_of(row));
    index->reserve(ids, hashes);
    for (size_t i = 0; i < ids.size(); ++i) {
      index->insert(hash_of_id(ids[i]), layout_.number(first + i));
    }
  }
  return index;
}

bool RowStore::make_writable(RowNumber row) {
  const size_t slab = layout_.slab_of(row);
  if (slabs_.is_own(slab)) return false;
  BufferRef copy = allocate_(layout_.slab_bytes());
  std::memcpy(copy->data(), slabs_.begin_of(slab), layout_.slab_bytes());
  slabs_.replace(slab, std::move(copy));
  return true;
}

void RowStore::read(std::span<const uint64_t> ids, std::byte* values,
                    const RowSnapshot* then) const {
  const View of = then != nullptr ? View{*then->index, then->slabs, then->end} : now();
  const size_t value_bytes = shape_.value_bytes();
  look_up(of, ids, kIdBytes + value_bytes, [&](size_t i, RowNumber row) {
    std::byte* const to = values + i * value_bytes;
    if (row == kNoRow) {
      write_first_values(first_values_, ids[i], shape_.dim, shape_.dtype, to);
    } else {
      std::memcpy(to, record(of, row) + kIdBytes, value_bytes);
    }
  });
}

void RowStore::copy(const RowSnapshot& from, size_t first, size_t count, std::byte* records) const {
  while (count > 0) {
    const RowNumber row = layout_.number(first);
    const size_t here = std::min(count, layout_.rows_per_slab() - first % layout_.rows_per_slab());
    const size_t num_bytes = here * layout_.record_bytes();
    std::memcpy(records, from.slabs.begin_of(layout_.slab_of(row)) + layout_.offset_of(row),
                num_bytes);
    records += num_bytes;
    first += here;
    count -= here;
  }
}

void RowStore::copy(const RowSnapshot& from, std::span<const uint32_t> places,
                    std::byte* records) const {
  const size_t record_bytes = layout_.record_bytes();
  for (const uint32_t place : places) {
    const RowNumber row = layout_.number(place);
    std::memcpy(records, from.slabs.begin_of(layout_.slab_of(row)) + layout_.offset_of(row),
                record_bytes);
    records += record_bytes;
  }
}

void RowStore::copy_ids(const RowSnapshot& from, size_t first, size_t count, std::byte* ids) const {
  for (size_t i = 0; i < count; ++i) {
    const RowNumber row = layout_.number(first + i);
    std::memcpy(ids + i * kIdBytes,
                from.slabs.begin_of(layout_.slab_of(row)) + layout_.offset_of(row), kIdBytes);
  }
}

void RowStore::load(std::span<const std::byte> records) {
  const size_t record_bytes = layout_.record_bytes();
  if (records.size() % record_bytes != 0) {
    throw Error(ErrorCode::BAD_ARGUMENT, "records of rows have " + std::to_string(records.size()) +
                                             " bytes, and each has " +
                                             std::to_string(record_bytes));
  }
  std::vector<uint64_t> ids;
  for (size_t at = 0; at < records.size(); at += ids.size() * record_bytes) {
    const size_t count = std::min(kAddedTogether, (records.size() - at) / record_bytes);
    ids.resize(count);
    for (size_t i = 0; i < count; ++i) ids[i] = id_in(records.data() + at + i * record_bytes);
    reserve(ids);
    for (size_t i = 0; i < count; ++i)
      load_one(records.subspan(at + i * record_bytes, record_bytes));
  }
}

void RowStore::load_one(std::span<const std::byte> record) {
  const uint64_t id = id_in(record.data());
  RowNumber there;
  find({&id, 1}, {&there, 1});
  if (there != kNoRow) {
    throw Error(ErrorCode::BAD_ARGUMENT, "row " + std::to_string(id) + " is there twice");
  }
  const RowNumber row = append(id);
  std::memcpy(value(row), record.data() + kIdBytes, record.size() - kIdBytes);
  if (shape_.has_usage && !holds(BreakableRule::kUSAGE_IS_LOADED)) set_usage(row, 0);
}

}  // namespace psstore
