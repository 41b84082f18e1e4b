#include "core/crc32c.h"

#include <array>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace psstore {
namespace {

// The polynomial, bit-reversed: bit 31 is x^0. The state below is the checksum without the final and
// initial inversion, which the public functions add.
constexpr uint32_t kPolynomial = 0x82f63b78;

// One zero bit appended to the message: the state times x, modulo the polynomial.
constexpr uint32_t times_x(uint32_t state) {
  return state >> 1 ^ ((state & 1) != 0 ? kPolynomial : 0);
}

// ---- portable: slicing by 8 (Kounavis and Berry, 2005) ----------------------------------------------
// Table k maps a byte to what it contributes k bytes further on, so that eight bytes take eight
// independent look-ups instead of a chain of eight.

using SlicingTables = std::array<std::array<uint32_t, 256>, 8>;

constexpr SlicingTables make_slicing_tables() {
  SlicingTables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t state = byte;
    for (int bit = 0; bit < 8; ++bit) state = times_x(state);
    tables[0][byte] = state;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t state = tables[k - 1][byte];
      tables[k][byte] = state >> 8 ^ tables[0][state & 0xff];
    }
  }
  return tables;
}
constexpr SlicingTables kSlicing = make_slicing_tables();

uint64_t load64(const std::byte* data) {
  uint64_t word;
  std::memcpy(&word, data, sizeof word);
  return word;
}

uint32_t extend_portable(uint32_t state, const std::byte* data, size_t size) {
  static_assert(std::endian::native == std::endian::little, "words are read lowest byte first");
  for (; size >= 8; data += 8, size -= 8) {
    const uint64_t word = load64(data) ^ state;
    state = 0;
    for (size_t k = 0; k < 8; ++k) state ^= kSlicing[7 - k][word >> (8 * k) & 0xff];
  }
  for (; size > 0; ++data, --size) {
    state = state >> 8 ^ kSlicing[0][(state ^ std::to_integer<uint32_t>(*data)) & 0xff];
  }
  return state;
}

// ---- x86-64: the crc32 instruction of SSE 4.2 -------------------------------------------------------
// One instruction takes 8 bytes per cycle but answers after 3, so three lanes run side by side and
// their states are joined: a lane's state is moved past the bytes that follow it by a multiplication
// with a power of x, which is linear, hence four look-ups.

#if defined(__x86_64__)

// Bytes per lane. Long enough that joining (8 look-ups per 3 lanes) is noise, short enough that a
// 64 KiB piece is mostly lanes.
constexpr size_t kLaneBytes = 2048;

// a × b modulo the polynomial.
constexpr uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = times_x(b);
  }
  return product;
}

using ShiftTables = std::array<std::array<uint32_t, 256>, 4>;

// Table k maps byte k of a state to its share of the state kLaneBytes zero bytes later.
constexpr ShiftTables make_shift_tables() {
  uint32_t power = 1u << 31 >> 1;  // x; squared until it is x^(8 kLaneBytes)
  for (size_t exponent = 1; exponent < 8 * kLaneBytes; exponent *= 2)
    power = multiply(power, power);
  ShiftTables tables{};
  for (size_t k = 0; k < 4; ++k) {
    for (uint32_t byte = 0; byte < 256; ++byte) tables[k][byte] = multiply(byte << (8 * k), power);
  }
  return tables;
}
static_assert(std::has_single_bit(kLaneBytes), "make_shift_tables squares its way to the length");
constexpr ShiftTables kShift = make_shift_tables();

uint64_t shift_by_lane(uint64_t state) {
  return kShift[0][state & 0xff] ^ kShift[1][state >> 8 & 0xff] ^ kShift[2][state >> 16 & 0xff] ^
         kShift[3][state >> 24 & 0xff];
}

__attribute__((target("sse4.2"))) uint32_t extend_sse42(uint32_t initial, const std::byte* data,
                                                        size_t size) {
  uint64_t state = initial;
  for (; size >= 3 * kLaneBytes; data += 3 * kLaneBytes, size -= 3 * kLaneBytes) {
    uint64_t second = 0;
    uint64_t third = 0;
    for (size_t i = 0; i < kLaneBytes; i += 8) {
      state = _mm_crc32_u64(state, load64(data + i));
      second = _mm_crc32_u64(second, load64(data + kLaneBytes + i));
      third = _mm_crc32_u64(third, load64(data + 2 * kLaneBytes + i));
    }
    state = shift_by_lane(shift_by_lane(state) ^ second) ^ third;
  }
  for (; size >= 8; data += 8, size -= 8) state = _mm_crc32_u64(state, load64(data));
  auto narrow = static_cast<uint32_t>(state);
  for (; size > 0; ++data, --size) narrow = _mm_crc32_u8(narrow, std::to_integer<uint8_t>(*data));
  return narrow;
}

#endif

using Extend = uint32_t (*)(uint32_t state, const std::byte* data, size_t size);

Extend choose_extend() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) return extend_sse42;
#endif
  return extend_portable;
}

}  // namespace

uint32_t crc32c(std::span<const std::byte> bytes, uint32_t seed) {
  static const Extend extend = choose_extend();
  return ~extend(~seed, bytes.data(), bytes.size());
}

uint32_t crc32c_portable(std::span<const std::byte> bytes, uint32_t seed) {
  return ~extend_portable(~seed, bytes.data(), bytes.size());
}

}  // namespace psstore
