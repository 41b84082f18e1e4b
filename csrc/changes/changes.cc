#include "changes/changes.h"

#include <array>
#include <bit>
#include <cstring>

namespace psstore {
namespace {

constexpr size_t kMaxGapBytes = 5;
constexpr uint64_t kMore = 0x80;  // of a gap's byte: another one follows

// What is compared at a time: a cache line, which is found unchanged by a few instructions of any vector unit.
constexpr size_t kBlockBytes = 64;
constexpr size_t kWordBytes = sizeof(uint64_t);
constexpr size_t kBlockWords = kBlockBytes / kWordBytes;

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

  size_t num_bytes() const { return static_cast<size_t>(at_ - begin_); }

 private:
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

using Block = std::array<uint64_t, kBlockWords>;

// What differs, word by word; true: something does.
bool differ(const std::byte* before, const std::byte* after, Block& differences) {
  Block now;
  std::memcpy(differences.data(), before, kBlockBytes);
  std::memcpy(now.data(), after, kBlockBytes);
  uint64_t any = 0;
  for (size_t i = 0; i < kBlockWords; ++i) {
    differences[i] ^= now[i];
    any |= differences[i];
  }
  return any != 0;
}

// Adds the elements of a block that differ, the first of which is number `first`.
template <class Bits>
bool add_block(const Block& differences, const std::byte* after, uint64_t first,
               Writer<Bits>& writer) {
  constexpr size_t kBits = 8 * sizeof(Bits);
  for (size_t word = 0; word < kBlockWords; ++word) {
    uint64_t left = differences[word];
    while (left != 0) {
      const size_t lane = static_cast<size_t>(std::countr_zero(left)) / kBits;
      left &= ~(static_cast<uint64_t>(static_cast<Bits>(~Bits{0})) << (lane * kBits));
      const size_t index = word * (kWordBytes / sizeof(Bits)) + lane;
      if (!writer.add(first + index, after + index * sizeof(Bits))) return false;
    }
  }
  return true;
}

template <class Bits>
std::optional<size_t> encode(const std::byte* before, const std::byte* after, uint64_t num_elems,
                             std::span<std::byte> out) {
  constexpr uint64_t kBlockElems = kBlockBytes / sizeof(Bits);
  Writer<Bits> writer(out);
  Block differences;
  uint64_t i = 0;
  for (; i + kBlockElems <= num_elems; i += kBlockElems) {
    if (!differ(before + i * sizeof(Bits), after + i * sizeof(Bits), differences)) continue;
    if (!add_block(differences, after + i * sizeof(Bits), i, writer)) return std::nullopt;
  }
  for (; i < num_elems; ++i) {
    const size_t at = i * sizeof(Bits);
    if (std::memcmp(before + at, after + at, sizeof(Bits)) == 0) continue;
    if (!writer.add(i, after + at)) return std::nullopt;
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

template <class Bits>
std::optional<size_t> merge(std::span<const std::byte> older, std::span<const std::byte> newer,
                            std::span<std::byte> out) {
  Reader<Bits> before(older);
  Reader<Bits> after(newer);
  Writer<Bits> writer(out);
  bool has_before = before.next();
  bool has_after = after.next();
  while (has_before || has_after) {
    const bool takes_before = has_before && (!has_after || before.position() < after.position());
    const Reader<Bits>& taken = takes_before ? before : after;
    if (!writer.add(taken.position(), taken.bits())) return std::nullopt;
    const bool both = has_before && has_after && before.position() == after.position();
    if (takes_before || both) has_before = before.next();
    if (!takes_before) has_after = after.next();
  }
  return writer.num_bytes();
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

std::optional<size_t> encode_changes(size_t item_bytes, const std::byte* before,
                                     const std::byte* after, uint64_t num_elems,
                                     std::span<std::byte> out) {
  return with_bits(
      item_bytes, [&](auto bits) { return encode<decltype(bits)>(before, after, num_elems, out); });
}

bool are_changes(size_t item_bytes, std::span<const std::byte> payload, uint64_t num_elems) {
  return with_bits(item_bytes,
                   [&](auto bits) { return are_well_formed<decltype(bits)>(payload, num_elems); });
}

void apply_changes(size_t item_bytes, std::span<const std::byte> payload, std::byte* elements) {
  with_bits(item_bytes, [&](auto bits) { apply<decltype(bits)>(payload, elements); });
}

std::optional<size_t> merge_changes(size_t item_bytes, std::span<const std::byte> older,
                                    std::span<const std::byte> newer, std::span<std::byte> out) {
  return with_bits(item_bytes, [&](auto bits) { return merge<decltype(bits)>(older, newer, out); });
}

}  // namespace psstore
