// Which row an id has: open addressing in groups of 16, a tag of 7 bits of the hash for each place.
//
//   hash ─► group ─► | tags 16 × u8 |   one comparison of 16 tags; then the id of the record decides
//                    | rows 16 × u32 |  the row of each place
//
// A tag of 0 is a free place, so that fresh memory is an empty table; a group that has one ends the search, since rows
// are never taken out one by one. Source: the layout of SwissTable (Abseil, absl/container/internal/raw_hash_set.h).
//
// It grows without a stop: when 7 of 8 places are in use, a table of twice the size is begun beside it, and every row that
// is added moves one group. Until all have moved, a search may look into both.
//
// Ids are not kept here, but in the records: who asks says how a row's id is found. Not thread-safe.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>

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

// One table: groups of places, of which some are in use.
class Places {
 public:
  Places() = default;
  // `num_groups`: a power of two.
  Places(size_t num_groups, const AllocateMemory& allocate);

  size_t num_groups() const { return num_groups_; }
  size_t num_used() const { return num_used_; }
  // That may be in use: 7 of 8, so that a search ends soon.
  size_t max_used() const { return num_groups_ * kGroupPlaces / 8 * 7; }
  size_t num_bytes() const { return num_groups_ * kGroupPlaces * (1 + sizeof(RowNumber)); }

  void fetch(uint64_t hash) const {
    if (num_groups_ == 0) return;
    const size_t group = first_group(hash);
    __builtin_prefetch(tags(group));
    __builtin_prefetch(rows(group));
  }
  // The first row with the hash's tag, which may be another id's; kNoRow if there is none.
  RowNumber likely(uint64_t hash) const {
    if (num_groups_ == 0) return kNoRow;
    const size_t group = first_group(hash);
    const uint32_t found = matches(tags(group), tag_of(hash));
    return found == 0 ? kNoRow : rows(group)[std::countr_zero(found)];
  }
  // The row of which `is_it` is true; kNoRow if there is none.
  template <typename IsIt>
  RowNumber find(uint64_t hash, IsIt is_it) const {
    if (num_groups_ == 0) return kNoRow;
    const uint8_t tag = tag_of(hash);
    for (size_t group = first_group(hash);; group = (group + 1) & (num_groups_ - 1)) {
      for (uint32_t found = matches(tags(group), tag); found != 0; found &= found - 1) {
        const RowNumber row = rows(group)[std::countr_zero(found)];
        if (is_it(row)) return row;
      }
      if (matches(tags(group), 0) != 0) return kNoRow;
    }
  }
  // REQUIRES: the row is not there, and there is a free place.
  void insert(uint64_t hash, RowNumber row);
  // Calls `visit` with each row of a group.
  template <typename Visit>
  void for_each_in(size_t group, Visit visit) const {
    for (size_t i = 0; i < kGroupPlaces; ++i) {
      if (tags(group)[i] != 0) visit(rows(group)[i]);
    }
  }

 private:
  size_t first_group(uint64_t hash) const { return hash >> 7 & (num_groups_ - 1); }
  uint8_t* tags(size_t group) const {
    return reinterpret_cast<uint8_t*>(memory_->data()) + group * kGroupPlaces;
  }
  RowNumber* rows(size_t group) const {
    return reinterpret_cast<RowNumber*>(memory_->data() + num_groups_ * kGroupPlaces) +
           group * kGroupPlaces;
  }

  BufferRef memory_;
  size_t num_groups_ = 0;
  size_t num_used_ = 0;
};

}  // namespace row_index

class RowIndex {
 public:
  explicit RowIndex(AllocateMemory allocate) : allocate_(std::move(allocate)) {}

  size_t num_bytes() const { return current_.num_bytes() + old_.num_bytes(); }

  // Has what a search of that hash looks at first on its way from memory.
  void fetch(uint64_t hash) const {
    current_.fetch(hash);
    if (grows()) old_.fetch(hash);
  }
  // A row that the hash is likely to be of, so that its record may be fetched; kNoRow: there is none.
  RowNumber likely(uint64_t hash) const {
    const RowNumber row = current_.likely(hash);
    return row == kNoRow && grows() ? old_.likely(hash) : row;
  }
  // The row of which `is_it` is true; kNoRow if there is none.
  template <typename IsIt>
  RowNumber find(uint64_t hash, IsIt is_it) const {
    const RowNumber row = current_.find(hash, is_it);
    return row == kNoRow && grows() ? old_.find(hash, is_it) : row;
  }

  bool has_room(size_t num_more) const { return size_ + num_more <= current_.max_used(); }
  // Memory for so many more rows, so that adding them can't fail. `hash_of_row`: of a row that is here.
  template <typename HashOfRow>
  void reserve(size_t num_more, HashOfRow hash_of_row) {
    if (has_room(num_more)) return;
    const size_t num_all = size_ + num_more;
    while (grows()) move_group(hash_of_row);  // of who grows faster than rows are added one by one
    size_t num_groups = std::max<size_t>(1, 2 * current_.num_groups());
    while (num_groups * row_index::kGroupPlaces / 8 * 7 < num_all) num_groups *= 2;
    row_index::Places larger(num_groups, allocate_);
    old_ = std::exchange(current_, std::move(larger));
    next_to_move_ = 0;
    if (old_.num_used() == 0) old_ = {};
  }
  // REQUIRES: it is not here, and there is room.
  template <typename HashOfRow>
  void insert(uint64_t hash, RowNumber row, HashOfRow hash_of_row) {
    current_.insert(hash, row);
    ++size_;
    if (grows()) move_group(hash_of_row);
  }

  // A larger table is there, and not every row has moved to it.
  bool grows() const { return old_.num_groups() != 0; }

 private:
  template <typename HashOfRow>
  void move_group(HashOfRow hash_of_row) {
    old_.for_each_in(next_to_move_, [&](RowNumber row) { current_.insert(hash_of_row(row), row); });
    if (++next_to_move_ == old_.num_groups()) old_ = {};
  }

  const AllocateMemory allocate_;
  row_index::Places current_;
  row_index::Places old_;  // without places: all is in `current_`
  size_t next_to_move_ = 0;
  size_t size_ = 0;
};

}  // namespace psstore
