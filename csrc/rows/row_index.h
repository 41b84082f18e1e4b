// Which row an id has: open addressing in groups of 16, a tag of 7 bits of the hash for each place, in segments.
//
//   hash ─► directory ─► segment ─► group ─► | tags 16 × u8 |   one comparison of 16 tags; then the id of the record decides
//                                            | rows 16 × u32 |  the row of each place
//
//   hash   | partition: 8 | directory: as many as it takes of 21 | group: 28 | tag: 7 |        bits, the highest first
//
// A tag of 0 is a free place, so that fresh memory is an empty segment; a group that has one ends the search, since rows
// are never taken out one by one. Source: the layout of SwissTable (Abseil, absl/container/internal/raw_hash_set.h).
//
// It grows without a stop: a segment in which more than 7 of 8 places would be in use is replaced by a larger one, or, when it
// has its most groups, by two, between which the next bit of the hash decides. So the rows of one segment are what moves at
// once, and memory is taken by segments. Source: extendible hashing (Fagin et al., TODS 4(3), 1979).
//
// Ids are not kept here, but in the records: who asks says how a row's id is found. Not thread-safe.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "core/buffer.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace psstore {

// A row's number: where its record is (row_store.h).
using RowNumber = uint32_t;
inline constexpr RowNumber kNoRow = UINT32_MAX;

// Where memory comes from: contents undefined; throws Error(OUT_OF_MEMORY).
using AllocateMemory = std::function<BufferRef(size_t num_bytes)>;

// Source: the finaliser of MurmurHash3 (Appleby), a bijection in which each bit depends on all. A table's partition of an
// id is its highest bits; the index uses the lowest ones.
constexpr uint64_t hash_of_id(uint64_t id) {
  id ^= id >> 33;
  id *= 0xFF51AFD7ED558CCD;
  id ^= id >> 33;
  id *= 0xC4CEB9FE1A85EC53;
  return id ^ id >> 33;
}

namespace row_index {

inline constexpr size_t kGroupPlaces = 16;

// Bit i: tag i is that one. In the form of the target's baseline, and in one for every machine.
inline uint32_t matches_anywhere(const uint8_t* tags, uint8_t tag) {
  uint32_t found = 0;
  for (size_t i = 0; i < kGroupPlaces; ++i) {
    found |= static_cast<uint32_t>(tags[i] == tag) << i;
  }
  return found;
}
#if defined(__SSE2__)
inline uint32_t matches(const uint8_t* tags, uint8_t tag) {
  const __m128i group = _mm_loadu_si128(reinterpret_cast<const __m128i*>(tags));
  const __m128i equal = _mm_cmpeq_epi8(group, _mm_set1_epi8(static_cast<char>(tag)));
  return static_cast<uint32_t>(_mm_movemask_epi8(equal));
}
#else
inline uint32_t matches(const uint8_t* tags, uint8_t tag) {
  return matches_anywhere(tags, tag);
}
#endif

inline uint8_t tag_of(uint64_t hash) {
  return static_cast<uint8_t>(0x80 | (hash & 0x7F));
}

// Rows that a hash is likely to be of, so that their records may be fetched: of other ids with its tag there may be one
// before its own, in some 1 of 25 searches, and hardly ever two. kNoRow: there is none.
struct LikelyRows {
  RowNumber first = kNoRow;
  RowNumber second = kNoRow;
};

inline constexpr int kTagBits = 7;
inline constexpr int kGroupBits = 28;
inline constexpr int kDirectoryBits = 21;

// Groups of places, of which some are in use, in memory that is somebody else's.
class Places {
 public:
  Places(std::byte* memory, uint32_t num_groups) : memory_(memory), num_groups_(num_groups) {}

  static constexpr size_t num_bytes(size_t num_groups) {
    return num_groups * kGroupPlaces * (1 + sizeof(RowNumber));
  }
  // Places that may be in use: 7 of 8, so that a search ends soon.
  static constexpr size_t max_used(size_t num_groups) { return num_groups * kGroupPlaces / 8 * 7; }

  // Has none of them in use.
  void clear();
  [[gnu::always_inline]] void fetch(uint64_t hash) const {
    if (num_groups_ == 0) return;
    const size_t group = first_group(hash);
    __builtin_prefetch(tags(group));
    __builtin_prefetch(rows(group));
  }
  // The first rows with the hash's tag, in the first group that has any.
  LikelyRows likely(uint64_t hash) const {
    if (num_groups_ == 0) return {};
    const uint8_t tag = tag_of(hash);
    for (size_t group = first_group(hash);; group = after(group)) {
      const uint32_t found = matches(tags(group), tag);
      if (const uint32_t others = found & (found - 1); others != 0) {
        return {rows(group)[std::countr_zero(found)], rows(group)[std::countr_zero(others)]};
      }
      if (found != 0) return {rows(group)[std::countr_zero(found)]};
      if (matches(tags(group), 0) != 0) return {};
    }
  }
  // The row of which `is_it` is true; kNoRow if there is none.
  template <typename IsIt>
  RowNumber find(uint64_t hash, IsIt is_it) const {
    if (num_groups_ == 0) return kNoRow;
    const uint8_t tag = tag_of(hash);
    for (size_t group = first_group(hash);; group = after(group)) {
      for (uint32_t found = matches(tags(group), tag); found != 0; found &= found - 1) {
        const RowNumber row = rows(group)[std::countr_zero(found)];
        if (is_it(row)) return row;
      }
      if (matches(tags(group), 0) != 0) return kNoRow;
    }
  }
  // REQUIRES: the row is not there, and there is a free place.
  void insert(uint64_t hash, RowNumber row);
  // Calls `call` with each row that is there, in any order.
  template <typename Call>
  void for_each(Call call) const {
    for (size_t group = 0; group < num_groups_; ++group) {
      for (uint32_t used = 0xFFFF & ~matches(tags(group), 0); used != 0; used &= used - 1) {
        call(rows(group)[std::countr_zero(used)]);
      }
    }
  }

 private:
  // Source: Lemire, Fast Random Integer Generation in an Interval, TOMACS 29(1), 2019: for any number of groups.
  size_t first_group(uint64_t hash) const {
    return (hash >> kTagBits & ((uint64_t{1} << kGroupBits) - 1)) * num_groups_ >> kGroupBits;
  }
  size_t after(size_t group) const { return group + 1 == num_groups_ ? 0 : group + 1; }
  uint8_t* tags(size_t group) const {
    return reinterpret_cast<uint8_t*>(memory_) + group * kGroupPlaces;
  }
  RowNumber* rows(size_t group) const {
    return reinterpret_cast<RowNumber*>(memory_ + num_groups_ * size_t{kGroupPlaces}) +
           group * kGroupPlaces;
  }

  std::byte* memory_;
  uint32_t num_groups_;
};

}  // namespace row_index

class RowIndex {
 public:
  // Writes the hash of the id of each of these rows, which are here.
  using HashesOf = std::function<void(std::span<const RowNumber> rows, std::span<uint64_t> hashes)>;

  // Indexes of different numbers have their segments full at different numbers of rows, so that many that grow alike do not
  // take their memory at one time.
  RowIndex(AllocateMemory allocate, uint64_t number);

  size_t num_bytes() const;

  // Has what a search of that hash looks at first on its way from memory.
  [[gnu::always_inline]] void fetch(uint64_t hash) const { places_of(hash).fetch(hash); }
  row_index::LikelyRows likely(uint64_t hash) const { return places_of(hash).likely(hash); }
  // The row of which `is_it` is true; kNoRow if there is none.
  template <typename IsIt>
  RowNumber find(uint64_t hash, IsIt is_it) const {
    return places_of(hash).find(hash, is_it);
  }

  // Whether rows of these ids can be added without reserve().
  bool has_room(std::span<const uint64_t> ids) const;
  // Memory for rows of these ids, so that adding them can't fail. Throws what allocating throws, with every row still here.
  void reserve(std::span<const uint64_t> ids, const HashesOf& hashes_of);
  // REQUIRES: it is not here, and there is room.
  void insert(uint64_t hash, RowNumber row);

 private:
  // What a search needs of a segment.
  struct Entry {
    std::byte* memory = nullptr;
    uint32_t num_groups = 0;
    uint32_t segment = 0;
  };
  struct Segment {
    BufferRef memory;
    uint32_t num_groups = 0;
    uint32_t num_used = 0;
    uint32_t first_entry =
        0;  // of the directory; it has every one whose number ends in the same `depth` bits
    int depth = 0;

    row_index::Places places() const { return {memory ? memory->data() : nullptr, num_groups}; }
    size_t room() const { return row_index::Places::max_used(num_groups) - num_used; }
    // REQUIRES: there is room.
    void put(uint64_t hash, RowNumber row) {
      places().insert(hash, row);
      ++num_used;
    }
  };

  size_t entry_of(uint64_t hash) const {
    return hash >> (row_index::kTagBits + row_index::kGroupBits) & (directory_.size() - 1);
  }
  row_index::Places places_of(uint64_t hash) const {
    const Entry& entry = directory_[entry_of(hash)];
    return {entry.memory, entry.num_groups};
  }
  // How many of the ids are of each segment.
  std::vector<uint32_t> numbers_of(std::span<const uint64_t> ids) const;
  // Has the segment be larger, or two. It may have to be done again before so many more have room.
  void enlarge(uint32_t segment, size_t num_more, const HashesOf& hashes_of);
  bool may_split(const Segment& segment) const;
  uint32_t larger_groups(const Segment& segment, size_t num_more) const;
  // Splits the segment.
  void split(uint32_t number, const HashesOf& hashes_of);
  Segment empty_segment(uint32_t num_groups, uint32_t first_entry, int depth) const;
  // Puts it in the place of that segment, and in the directory.
  void enter(uint32_t number, Segment made);

  const AllocateMemory allocate_;
  const uint32_t split_groups_;
  const uint32_t full_groups_;
  std::vector<Entry> directory_;  // a power of two
  std::vector<Segment> segments_;
  size_t num_rows_ = 0;
  size_t least_room_ = 0;  // of all segments
};

}  // namespace psstore
