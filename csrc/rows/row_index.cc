#include "rows/row_index.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace psstore {
namespace row_index {

void Places::clear() {
  std::memset(memory_, 0, size_t{num_groups_} * kGroupPlaces);
}

void Places::insert(uint64_t hash, RowNumber row) {
  size_t group = first_group(hash);
  uint32_t free = matches(tags(group), 0);
  while (free == 0) {
    group = after(group);
    free = matches(tags(group), 0);
  }
  const auto place = static_cast<size_t>(std::countr_zero(free));
  tags(group)[place] = tag_of(hash);
  rows(group)[place] = row;
}

std::vector<RowNumber> Places::all() const {
  std::vector<RowNumber> found;
  found.reserve(max_used(num_groups_));
  for (size_t group = 0; group < num_groups_; ++group) {
    for (uint32_t used = 0xFFFF & ~matches(tags(group), 0); used != 0; used &= used - 1) {
      found.push_back(rows(group)[std::countr_zero(used)]);
    }
  }
  return found;
}

}  // namespace row_index

namespace {

using row_index::Places;

// The most groups of a segment: 20 to 32 KiB in the four sizes that a pool has between one power of two and the next, so
// that indexes of different numbers are full a quarter of a doubling apart. The rows of one move in less than 0.1 ms.
constexpr uint32_t kMostGroups[] = {256, 307, 358, 409};

// Entries of the directory are not more than a part of the rows, whatever ids somebody chooses: of those that have a large
// part of their hash in common the segment becomes larger.
constexpr size_t kRowsPerEntry = 512;

}  // namespace

RowIndex::RowIndex(AllocateMemory allocate, uint64_t number)
    : allocate_(std::move(allocate)),
      most_groups_(kMostGroups[number % std::size(kMostGroups)]),
      directory_(1),
      segments_(1) {}

size_t RowIndex::num_bytes() const {
  size_t num_bytes = directory_.size() * sizeof(Entry) + segments_.size() * sizeof(Segment);
  for (const Segment& segment : segments_) num_bytes += Places::num_bytes(segment.num_groups);
  return num_bytes;
}

std::vector<uint32_t> RowIndex::numbers_of(std::span<const uint64_t> ids) const {
  std::vector<uint32_t> numbers(segments_.size());
  for (const uint64_t id : ids) ++numbers[directory_[entry_of(hash_of_id(id))].segment];
  return numbers;
}

bool RowIndex::has_room(std::span<const uint64_t> ids) const {
  if (ids.size() <= least_room_) return true;
  const std::vector<uint32_t> numbers = numbers_of(ids);
  for (size_t i = 0; i < segments_.size(); ++i) {
    if (numbers[i] > segments_[i].room()) return false;
  }
  return true;
}

void RowIndex::reserve(std::span<const uint64_t> ids, const HashesOf& hashes_of) {
  bool has_changed = true;
  while (has_changed && ids.size() > least_room_) {
    has_changed = false;
    const std::vector<uint32_t> numbers = numbers_of(ids);
    for (uint32_t i = 0; i < numbers.size(); ++i) {
      if (numbers[i] <= segments_[i].room()) continue;
      enlarge(i, numbers[i], hashes_of);
      has_changed = true;
    }
    if (has_changed) {
      least_room_ = std::ranges::min_element(segments_, {}, &Segment::room)->room();
    }
  }
}

void RowIndex::insert(uint64_t hash, RowNumber row) {
  const Entry& entry = directory_[entry_of(hash)];
  Places(entry.memory, entry.num_groups).insert(hash, row);
  Segment& segment = segments_[entry.segment];
  ++segment.num_used;
  ++num_rows_;
  least_room_ = std::min(least_room_, segment.room());
}

// All that can fail comes first.
void RowIndex::enlarge(uint32_t number, size_t num_more, const HashesOf& hashes_of) {
  const Segment old = segments_[number];
  const bool splits = may_split(old);
  const std::vector<RowNumber> rows = old.places().all();
  std::vector<uint64_t> hashes(rows.size());
  hashes_of(rows, hashes);
  Segment halves[2];
  halves[0] = empty_segment(splits ? old.num_groups : larger(old, num_more), old.first_entry,
                            old.depth + splits);
  if (splits) {
    halves[1] = empty_segment(old.num_groups, old.first_entry | 1u << old.depth, old.depth + 1);
    segments_.reserve(segments_.size() + 1);
    if (size_t{1} << old.depth == directory_.size()) {
      directory_.reserve(2 * directory_.size());
      directory_.insert(directory_.end(), directory_.begin(), directory_.end());
    }
  }

  const int bit = row_index::kTagBits + row_index::kGroupBits + old.depth;
  for (size_t i = 0; i < rows.size(); ++i) {
    Segment& half = halves[splits ? hashes[i] >> bit & 1 : 0];
    half.places().insert(hashes[i], rows[i]);
    ++half.num_used;
  }
  segments_[number] = std::move(halves[0]);
  enter(number);
  if (splits) {
    segments_.push_back(std::move(halves[1]));
    enter(static_cast<uint32_t>(segments_.size() - 1));
  }
}

bool RowIndex::may_split(const Segment& segment) const {
  if (segment.num_groups < most_groups_ || segment.depth == row_index::kDirectoryBits) return false;
  const size_t num_entries = size_t{2} << segment.depth;
  return num_entries <= directory_.size() || num_entries * kRowsPerEntry <= num_rows_;
}

uint32_t RowIndex::larger(const Segment& segment, size_t num_more) const {
  const uint32_t most = segment.num_groups < most_groups_ ? most_groups_ : UINT32_MAX / 2;
  uint32_t num_groups = segment.num_groups;
  do {
    num_groups = std::min(most, std::max(1u, 2 * num_groups));
  } while (num_groups < most && Places::max_used(num_groups) < segment.num_used + num_more);
  return num_groups;
}

RowIndex::Segment RowIndex::empty_segment(uint32_t num_groups, uint32_t first_entry,
                                          int depth) const {
  Segment made{allocate_(Places::num_bytes(num_groups)), num_groups, 0, first_entry, depth};
  made.places().clear();
  return made;
}

void RowIndex::enter(uint32_t number) {
  const Segment& segment = segments_[number];
  for (size_t i = segment.first_entry; i < directory_.size(); i += size_t{1} << segment.depth) {
    directory_[i] = {segment.memory->data(), segment.num_groups, number};
  }
}

}  // namespace psstore
