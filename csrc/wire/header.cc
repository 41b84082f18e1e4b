#include "wire/header.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/crc32c.h"

namespace psstore {
namespace {

bool is_op(Op op) {
  switch (op) {
#define PSSTORE_X(name, number, body, meaning) case Op::k##name:
    PSSTORE_OPS(PSSTORE_X)
#undef PSSTORE_X
    return true;
  }
  return false;
}

// The bytes a peer sent in place of the magic, fit for a log line: "GET " or "\x16\x03\x01\x00".
std::string printable(std::span<const std::byte> bytes) {
  static constexpr char kHexDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::byte raw : bytes) {
    const auto value = std::to_integer<unsigned char>(raw);
    if (value >= ' ' && value <= '~') {
      text += static_cast<char>(value);
    } else {
      text += "\\x";
      text += kHexDigits[value >> 4];
      text += kHexDigits[value & 15];
    }
  }
  return text;
}

}  // namespace

void check_preamble(std::span<const std::byte> prefix) {
  const size_t num_magic_bytes = std::min(prefix.size(), sizeof kMagic);
  if (std::memcmp(prefix.data(), &kMagic, num_magic_bytes) != 0) {
    throw Error(ErrorCode::BAD_MAGIC, "expected a frame that starts with 'PSS1', got '" +
                                          printable(prefix.first(num_magic_bytes)) +
                                          "': the peer does not speak psstore's protocol");
  }
  constexpr size_t kVersionOffset = offsetof(Header, version);
  if (prefix.size() <= kVersionOffset) return;
  const auto version = std::to_integer<uint8_t>(prefix[kVersionOffset]);
  if (version != kProtocolVersion) {
    throw Error(ErrorCode::BAD_VERSION, "the peer speaks protocol version " +
                                            std::to_string(version) + ", this is version " +
                                            std::to_string(kProtocolVersion) +
                                            ": install the same psstore on both sides");
  }
}

Header parse_header(std::span<const std::byte> bytes) {
  Header header;
  std::memcpy(&header, bytes.data(), kHeaderBytes);
  if (header.header_crc != compute_header_crc(header)) {
    throw Error(ErrorCode::BAD_CHECKSUM, "a header changed on the way: its CRC-32C differs");
  }
  check_preamble(bytes.first(kHeaderBytes));
  if (!is_op(header.op)) {
    throw Error(ErrorCode::BAD_HEADER,
                "operation " + std::to_string(static_cast<int>(header.op)) + " does not exist");
  }
  if ((header.flags & ~kKnownFlags) != 0) {
    throw Error(ErrorCode::BAD_HEADER, "unknown flags: " + std::to_string(header.flags));
  }
  if (!header.has_checksum() && header.payload_crc != 0) {
    throw Error(ErrorCode::BAD_HEADER, "a payload checksum without the flag that announces it");
  }
  if (header.has_checksum() && header.is_shared()) {
    throw Error(ErrorCode::BAD_HEADER, "a checksum of a payload that is not on the stream");
  }
  return header;
}

uint32_t compute_header_crc(const Header& header) {
  return crc32c(std::as_bytes(std::span(&header, 1)).first(offsetof(Header, header_crc)));
}

uint32_t compute_fields_crc(std::span<const SliceEntry> table, std::span<const std::byte> body) {
  return crc32c(body, crc32c(std::as_bytes(table)));
}

}  // namespace psstore
