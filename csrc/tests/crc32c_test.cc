// CRC-32C against published vectors, against itself in pieces, and the fast path against the plain one.
#include "core/crc32c.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string_view>
#include <vector>

namespace psstore::testing {
namespace {

std::vector<std::byte> random_bytes(size_t size) {
  std::mt19937 random(static_cast<uint32_t>(size));
  std::vector<std::byte> bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

// The definition, a bit at a time.
uint32_t crc32c_by_bit(std::span<const std::byte> bytes) {
  uint32_t state = 0xffffffff;
  for (const std::byte byte : bytes) {
    state ^= std::to_integer<uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) state = state >> 1 ^ ((state & 1) != 0 ? 0x82f63b78 : 0);
  }
  return ~state;
}

TEST(Crc32c, MatchesPublishedVectors) {
  // RFC 3720 B.4, and the check value of the CRC catalogue.
  const std::vector<std::byte> zeros(32, std::byte{0});
  const std::vector<std::byte> ones(32, std::byte{0xff});
  const std::string_view digits = "123456789";
  EXPECT_EQ(crc32c(zeros), 0x8a9136aau);
  EXPECT_EQ(crc32c(ones), 0x62a8ab43u);
  EXPECT_EQ(crc32c(std::as_bytes(std::span(digits))), 0xe3069283u);
  EXPECT_EQ(crc32c({}), 0u);
}

// Lengths around the word, and around the three lanes of the fast path (3 × 2048).
class Crc32cLength : public ::testing::TestWithParam<size_t> {};

TEST_P(Crc32cLength, EveryPathAgrees) {
  const std::vector<std::byte> bytes = random_bytes(GetParam());
  const uint32_t expected = crc32c_by_bit(bytes);
  EXPECT_EQ(crc32c(bytes), expected);
  EXPECT_EQ(crc32c_portable(bytes), expected);
}

TEST_P(Crc32cLength, CutAnywhereItIsTheSame) {
  const std::vector<std::byte> storage = random_bytes(GetParam() + 1);
  const std::span<const std::byte> bytes = std::span(storage).subspan(1);  // and unaligned
  const uint32_t whole = crc32c(bytes);
  for (const size_t cut : {size_t{0}, bytes.size() / 3, bytes.size() / 2, bytes.size()}) {
    EXPECT_EQ(crc32c(bytes.subspan(cut), crc32c(bytes.first(cut))), whole);
    EXPECT_EQ(crc32c_portable(bytes.subspan(cut), crc32c_portable(bytes.first(cut))), whole);
  }
}

INSTANTIATE_TEST_SUITE_P(Lengths, Crc32cLength,
                         ::testing::Values(0, 1, 7, 8, 9, 63, 64, 65, 6143, 6144, 6145, 6152, 12287,
                                           12288, 12289, 50'000));

}  // namespace
}  // namespace psstore::testing
