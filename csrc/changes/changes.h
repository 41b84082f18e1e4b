// Changes: the elements of a slice whose bits differ from what somebody has, without loss.
//
//   | gap | bits | gap | bits | ... to the end of the payload      nothing has changed: no bytes
//
// gap     how many elements are left out since the one before, or since the beginning: base 128, the low seven bits
//         first, the high bit of a byte says that another one follows (LEB128, DWARF 5, 7.6); 5 bytes at most
// bits    the element as it is now: 2, 4 or 8 bytes, little-endian, of any alignment
//
// Bits are compared, not numbers: a NaN stays the NaN that it was, and -0 is not 0. Who has the slice as it was, bit for
// bit, and applies the changes to it has it as it is now, bit for bit.
//
// One thread at a time per payload; nothing is kept, nothing allocated.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace psstore {

// Bytes of one of a slice's elements that changes can be about.
constexpr bool has_changes_of(size_t item_bytes) {
  return item_bytes == 2 || item_bytes == 4 || item_bytes == 8;
}

// All of the following REQUIRE has_changes_of(item_bytes).

// Marks: a bit for each element, in words of 64. Those of several changes, ORed, are of all of them: what is encoded of the
// last elements by them has the effect of one after the other.
constexpr size_t num_mark_words(uint64_t num_elems) {
  return (num_elems + 63) / 64;
}

// Sets the marks of the elements that differ, and no others.
void mark_changes(size_t item_bytes, const std::byte* before, const std::byte* after,
                  uint64_t num_elems, uint64_t* marks);

// Writes changes to what the marked elements are in `after`, and returns how many bytes they are. None: they don't fit
// into `out`, whose contents are undefined then.
std::optional<size_t> encode_changes(size_t item_bytes, const uint64_t* marks,
                                     const std::byte* after, uint64_t num_elems,
                                     std::span<std::byte> out);

// Whether the payload says changes of a slice of so many elements. What comes from outside is asked this before anything
// else is done with it; the rest REQUIRES it.
bool are_changes(size_t item_bytes, std::span<const std::byte> payload, uint64_t num_elems);

// Makes `elements` what they are after the changes.
void apply_changes(size_t item_bytes, std::span<const std::byte> payload, std::byte* elements);

}  // namespace psstore
