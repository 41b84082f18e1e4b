#include "changes/changes.h"

#include <bit>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace psstore {
namespace {

constexpr size_t kMaxGapBytes = 5;
constexpr uint64_t kMore = 0x80;  // of a gap's byte: another one follows

constexpr uint64_t kBlockElems = 64;  // what is compared at a time, and has a word of marks

size_t gap_bytes(uint64_t gap) {
  size_t count = 1;
  for (; gap >= kMore; gap >>= 7) ++count;
  return count;
}

// Writes changes one after the other.
template <class Bits>
class Writer {
 public:
  explicit Writer(std::span<std::byte> out)
      : begin_(out.data()), at_(begin_), end_(begin_ + out.size()) {}

  // False: there is no room for it. REQUIRES: positions ascend.
  bool add(uint64_t position, const std::byte* bits) {
    const uint64_t gap = position - next_;
    const size_t needed = gap < kMore ? 1 : gap_bytes(gap);
    if (static_cast<size_t>(end_ - at_) < needed + sizeof(Bits)) return false;
    write_gap(gap);
    std::memcpy(at_, bits, sizeof(Bits));
    at_ += sizeof(Bits);
    next_ = position + 1;
    return true;
  }

  // Adds the marked ones of a block that begins with element `first`. False: there is no room for them.
  bool add_marked(uint64_t marks, uint64_t first, const std::byte* after) {
    if (marks == 0) return true;
    constexpr size_t kMost = kMaxGapBytes + kBlockElems * (1 + sizeof(Bits));
    const bool has_room = static_cast<size_t>(end_ - at_) >= kMost;
    const auto lowest = static_cast<uint64_t>(std::countr_zero(marks));
    if (!add(first + lowest, after + lowest * sizeof(Bits))) return false;
    for (marks &= marks - 1; marks != 0; marks &= marks - 1) {
      const auto place = static_cast<uint64_t>(std::countr_zero(marks));
      const std::byte* bits = after + place * sizeof(Bits);
      if (!has_room && !add(first + place, bits)) return false;
      if (has_room) add_near(first + place, bits);
    }
    return true;
  }

  size_t num_bytes() const { return static_cast<size_t>(at_ - begin_); }

 private:
  // REQUIRES: there is room; the gap is a byte.
  void add_near(uint64_t position, const std::byte* bits) {
    *at_++ = static_cast<std::byte>(position - next_);
    std::memcpy(at_, bits, sizeof(Bits));
    at_ += sizeof(Bits);
    next_ = position + 1;
  }

  void write_gap(uint64_t gap) {
    for (; gap >= kMore; gap >>= 7) *at_++ = static_cast<std::byte>(gap | kMore);
    *at_++ = static_cast<std::byte>(gap);
  }

  std::byte* begin_;
  std::byte* at_;
  std::byte* end_;
  uint64_t next_ = 0;
};

// Reads changes one after the other.
template <class Bits>
class Reader {
 public:
  explicit Reader(std::span<const std::byte> payload)
      : at_(payload.data()), end_(at_ + payload.size()) {}

  // Goes to the next one. False: there is none, or what follows is none.
  bool next() {
    uint64_t gap = 0;
    if (!read_gap(gap) || static_cast<size_t>(end_ - at_) < sizeof(Bits)) return false;
    position_ = next_ + gap;
    next_ = position_ + 1;
    bits_ = at_;
    at_ += sizeof(Bits);
    return true;
  }

  uint64_t position() const { return position_; }
  const std::byte* bits() const { return bits_; }
  bool is_at_end() const { return at_ == end_; }

 private:
  bool read_gap(uint64_t& gap) {
    if (at_ == end_) return false;
    gap = std::to_integer<uint64_t>(*at_);
    if (gap < kMore) {
      ++at_;
      return true;
    }
    return read_long_gap(gap);
  }

  bool read_long_gap(uint64_t& gap) {
    gap = 0;
    for (size_t i = 0; i < kMaxGapBytes && at_ + i != end_; ++i) {
      const auto byte = std::to_integer<uint64_t>(at_[i]);
      gap |= (byte & (kMore - 1)) << (7 * i);
      if (byte >= kMore) continue;
      at_ += i + 1;
      return true;
    }
    return false;
  }

  const std::byte* at_;
  const std::byte* end_;
  const std::byte* bits_ = nullptr;
  uint64_t position_ = 0;
  uint64_t next_ = 0;
};

constexpr size_t kLanes = 16;  // elements that are compared at once

#if defined(__SSE2__)
__m128i loaded(const std::byte* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}

// Eight elements, each all ones if it is the same in both.
__m128i same_8(const std::byte* before, const std::byte* after, uint16_t) {
  return _mm_cmpeq_epi16(loaded(before), loaded(after));
}
__m128i same_8(const std::byte* before, const std::byte* after, uint32_t) {
  return _mm_packs_epi32(_mm_cmpeq_epi32(loaded(before), loaded(after)),
                         _mm_cmpeq_epi32(loaded(before + 16), loaded(after + 16)));
}
__m128i same_8(const std::byte* before, const std::byte* after, uint64_t) {
  // An element is the same if both of its halves are.
  const auto same_4 = [=](size_t at) {
    const __m128i low = _mm_cmpeq_epi32(loaded(before + at), loaded(after + at));
    const __m128i high = _mm_cmpeq_epi32(loaded(before + at + 16), loaded(after + at + 16));
    const __m128i halves = _mm_packs_epi32(low, high);
    return _mm_cmpeq_epi32(halves, _mm_set1_epi32(-1));
  };
  return _mm_packs_epi32(same_4(0), same_4(32));
}

template <class Bits>
uint64_t marks_of_lanes(const std::byte* before, const std::byte* after) {
  constexpr size_t kHalf = kLanes / 2 * sizeof(Bits);
  const __m128i same =
      _mm_packs_epi16(same_8(before, after, Bits{}), same_8(before + kHalf, after + kHalf, Bits{}));
  return static_cast<uint16_t>(~_mm_movemask_epi8(same));
}
#else
template <class Bits>
uint64_t marks_of_lanes(const std::byte* before, const std::byte* after) {
  uint64_t marks = 0;
  for (size_t i = 0; i < kLanes; ++i) {
    Bits from;
    Bits to;
    std::memcpy(&from, before + i * sizeof(Bits), sizeof from);
    std::memcpy(&to, after + i * sizeof(Bits), sizeof to);
    marks |= static_cast<uint64_t>(from != to) << i;
  }
  return marks;
}
#endif

template <class Bits>
void mark(const std::byte* before, const std::byte* after, uint64_t num_elems, uint64_t* marks) {
  uint64_t first = 0;
  for (; first + kBlockElems <= num_elems; first += kBlockElems) {
    uint64_t of_block = 0;
    for (size_t i = 0; i < kBlockElems; i += kLanes) {
      const size_t at = (first + i) * sizeof(Bits);
      of_block |= marks_of_lanes<Bits>(before + at, after + at) << i;
    }
    *marks++ = of_block;
  }
  if (first == num_elems) return;
  *marks = 0;
  for (uint64_t i = first; i < num_elems; ++i) {
    const size_t at = i * sizeof(Bits);
    if (std::memcmp(before + at, after + at, sizeof(Bits)) != 0) *marks |= 1ULL << (i - first);
  }
}

template <class Bits>
std::optional<size_t> encode(const uint64_t* marks, const std::byte* after, uint64_t num_elems,
                             std::span<std::byte> out) {
  Writer<Bits> writer(out);
  for (size_t word = 0; word < num_mark_words(num_elems); ++word) {
    const uint64_t first = word * kBlockElems;
    if (!writer.add_marked(marks[word], first, after + first * sizeof(Bits))) return std::nullopt;
  }
  return writer.num_bytes();
}

template <class Bits>
bool are_well_formed(std::span<const std::byte> payload, uint64_t num_elems) {
  Reader<Bits> reader(payload);
  while (reader.next()) {
    if (reader.position() >= num_elems) return false;
  }
  return reader.is_at_end();
}

template <class Bits>
void apply(std::span<const std::byte> payload, std::byte* elements) {
  Reader<Bits> reader(payload);
  while (reader.next()) {
    std::memcpy(elements + reader.position() * sizeof(Bits), reader.bits(), sizeof(Bits));
  }
}

// Calls with an unsigned type of so many bytes.
template <class Call>
auto with_bits(size_t item_bytes, Call call) {
  switch (item_bytes) {
    case 2: return call(uint16_t{});
    case 4: return call(uint32_t{});
    default: return call(uint64_t{});
  }
}

}  // namespace

void mark_changes(size_t item_bytes, const std::byte* before, const std::byte* after,
                  uint64_t num_elems, uint64_t* marks) {
  with_bits(item_bytes, [&](auto bits) { mark<decltype(bits)>(before, after, num_elems, marks); });
}

std::optional<size_t> encode_changes(size_t item_bytes, const uint64_t* marks,
                                     const std::byte* after, uint64_t num_elems,
                                     std::span<std::byte> out) {
  return with_bits(item_bytes,
                   [&](auto bits) { return encode<decltype(bits)>(marks, after, num_elems, out); });
}

bool are_changes(size_t item_bytes, std::span<const std::byte> payload, uint64_t num_elems) {
  return with_bits(item_bytes,
                   [&](auto bits) { return are_well_formed<decltype(bits)>(payload, num_elems); });
}

void apply_changes(size_t item_bytes, std::span<const std::byte> payload, std::byte* elements) {
  with_bits(item_bytes, [&](auto bits) { apply<decltype(bits)>(payload, elements); });
}

}  // namespace psstore
