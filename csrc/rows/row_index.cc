#include "rows/row_index.h"

#include <algorithm>
#include <array>
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

}  // namespace row_index

namespace {

using row_index::Places;

// Groups of a segment that one which is full is split into, and of the one that is full: 20 to 48 KiB, in sizes that a pool
// has, so that indexes of different numbers are full at different numbers of rows. The rows of one move in 0.2 ms.
struct SegmentSizes {
  uint32_t split_groups;
  uint32_t full_groups;
};
constexpr SegmentSizes kSegmentSizes[] = {{256, 409}, {307, 512}, {358, 512}, {409, 614}};

// Entries of the directory are not more than a part of the rows, whatever ids somebody chooses: of those that have a large
// part of their hash in common the segment becomes larger.
constexpr size_t kRowsPerEntry = 512;

// Rows of a segment whose hashes are asked for at once: enough that the records of most are on their way meanwhile.
constexpr size_t kHashedTogether = 256;

// Calls `call` with the hash of each row that is there, and the row, until it returns false. Whether it never did.
template <typename Call>
bool for_each_hashed(const Places& places, const RowIndex::HashesOf& hashes_of, Call call) {
  std::array<RowNumber, kHashedTogether> rows;
  std::array<uint64_t, kHashedTogether> hashes;
  size_t count = 0;
  bool goes_on = true;
  const auto call_with_all = [&] {
    hashes_of(std::span(rows).first(count), hashes);
    for (size_t i = 0; i < count && goes_on; ++i) goes_on = call(hashes[i], rows[i]);
    count = 0;
  };
  places.for_each([&](RowNumber row) {
    rows[count++] = row;
    if (count == rows.size()) call_with_all();
  });
  call_with_all();
  return goes_on;
}

}  // namespace

RowIndex::RowIndex(AllocateMemory allocate, uint64_t number)
    : allocate_(std::move(allocate)),
      split_groups_(kSegmentSizes[number % std::size(kSegmentSizes)].split_groups),
      full_groups_(kSegmentSizes[number % std::size(kSegmentSizes)].full_groups),
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
    // There may be many more segments than ids: those of the ids alone are looked at.
    std::vector<uint32_t> numbers = numbers_of(ids);
    std::vector<std::pair<uint32_t, uint32_t>> to_enlarge;
    for (const uint64_t id : ids) {
      const uint32_t segment = directory_[entry_of(hash_of_id(id))].segment;
      const uint32_t number = std::exchange(numbers[segment], 0);
      if (number > segments_[segment].room()) to_enlarge.emplace_back(segment, number);
    }
    for (const auto& [segment, number] : to_enlarge) enlarge(segment, number, hashes_of);
    has_changed = !to_enlarge.empty();
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
  const Segment& old = segments_[number];
  if (may_split(old)) return split(number, hashes_of);
  Segment larger = empty_segment(larger_groups(old, num_more), old.first_entry, old.depth);
  for_each_hashed(old.places(), hashes_of, [&](uint64_t hash, RowNumber row) {
    larger.put(hash, row);
    return true;
  });
  enter(number, std::move(larger));
}

// Into two of the usual size, which each have room for a half. Of ids that somebody chose one may have more: it is begun
// anew then, twice as large.
void RowIndex::split(uint32_t number, const HashesOf& hashes_of) {
  const Segment old = segments_[number];
  const int bit = row_index::kTagBits + row_index::kGroupBits + old.depth;
  std::array<Segment, 2> halves;
  std::array<uint32_t, 2> num_groups{split_groups_, split_groups_};
  bool has_room = false;
  while (!has_room) {
    halves[0] = empty_segment(num_groups[0], old.first_entry, old.depth + 1);
    halves[1] = empty_segment(num_groups[1], old.first_entry | 1u << old.depth, old.depth + 1);
    has_room = for_each_hashed(old.places(), hashes_of, [&](uint64_t hash, RowNumber row) {
      const size_t half = hash >> bit & 1;
      if (halves[half].room() == 0) {
        num_groups[half] *= 2;
        return false;
      }
      halves[half].put(hash, row);
      return true;
    });
  }
  if (segments_.size() == segments_.capacity()) segments_.reserve(2 * segments_.size());
  if (size_t{1} << old.depth == directory_.size()) {
    directory_.reserve(2 * directory_.size());
    directory_.insert(directory_.end(), directory_.begin(), directory_.end());
  }
  segments_.emplace_back();
  enter(number, std::move(halves[0]));
  enter(static_cast<uint32_t>(segments_.size() - 1), std::move(halves[1]));
}

bool RowIndex::may_split(const Segment& segment) const {
  if (segment.num_groups < full_groups_ || segment.depth == row_index::kDirectoryBits) return false;
  const size_t num_entries = size_t{2} << segment.depth;
  return num_entries <= directory_.size() || num_entries * kRowsPerEntry <= num_rows_;
}

// It is 2^n, then the least that may be split, and twice as many each time where none may.
uint32_t RowIndex::larger_groups(const Segment& segment, size_t num_more) const {
  uint32_t num_groups = segment.num_groups;
  do {
    if (num_groups < split_groups_) {
      num_groups = std::min(split_groups_, std::max(1u, 2 * num_groups));
    } else {
      num_groups = num_groups < full_groups_ ? full_groups_ : 2 * num_groups;
    }
  } while (num_groups < full_groups_ && Places::max_used(num_groups) < segment.num_used + num_more);
  return num_groups;
}

RowIndex::Segment RowIndex::empty_segment(uint32_t num_groups, uint32_t first_entry,
                                          int depth) const {
  Segment made{allocate_(Places::num_bytes(num_groups)), num_groups, 0, first_entry, depth};
  made.places().clear();
  return made;
}

void RowIndex::enter(uint32_t number, Segment made) {
  const Segment& segment = segments_[number] = std::move(made);
  for (size_t i = segment.first_entry; i < directory_.size(); i += size_t{1} << segment.depth) {
    directory_[i] = {segment.memory->data(), segment.num_groups, number};
  }
}

}  // namespace psstore
