// The first 64 bytes of every frame: their layout, and the checks that need nothing but themselves.
//
//        0       1       2       3       4       5       6       7
//    0 | magic "PSS1"                  | version | op  | flags         |
//    8 | num_slices                    | body_bytes                    |
//   16 | payload_bytes                                                 |
//   24 | request                                                       |
//   32 | round                                                         |
//   40 | rank                          | incarnation                   |
//   48 | sequence                                                      |
//   56 | payload_crc                   | header_crc                    |
//
// All fields are little-endian. On the stream a frame is
//
//   header | num_slices × SliceEntry (32 bytes each) | body_bytes of MessagePack | fields_crc | payload
//
// but that with kFlagShared the payload lies in shared memory, where the table says, and not on the stream.
// fields_crc, 4 bytes, is the CRC-32C of table and body; a frame that has neither has none.
//
// request       chosen by who asks, repeated in the reply; 0: about the whole connection
// round         of a PUSH: the worker's step number; of a HOLD: 1 if rule state is held, too; of a PULL with a sequence:
//               the decision; of a PULLED: 1 if trained values were restored since the shard's last decision
// rank, incarnation   which worker, and which life of it, the frame speaks for
// sequence      of an ASSIGN, ADD or RESTORE: the client's count of its writes; of a HOLD or FREE, and of a PULL as of a
//               decision: the number that its reader has chosen
// payload_crc   CRC-32C of the payload if kFlagChecksum is set, else 0
// header_crc    CRC-32C of the 60 bytes before it; always set, always checked
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/types.h"
#include "wire/ops.h"

namespace psstore {

static_assert(std::endian::native == std::endian::little,
              "headers and slice tables are used in memory as they are on the wire");

inline constexpr uint32_t kMagic = 0x31535350;  // "PSS1" as it lies in memory
inline constexpr uint8_t kProtocolVersion = 3;

// payload_crc holds the payload's CRC-32C.
inline constexpr uint16_t kFlagChecksum = 1;
// The payload lies in shared memory; in a PULL, which has none, that of the answer may.
inline constexpr uint16_t kFlagShared = 2;
inline constexpr uint16_t kKnownFlags = kFlagChecksum | kFlagShared;

struct Header {
  uint32_t magic = kMagic;
  uint8_t version = kProtocolVersion;
  Op op = Op::kERROR;
  uint16_t flags = 0;
  uint32_t num_slices = 0;
  uint32_t body_bytes = 0;
  uint64_t payload_bytes = 0;
  uint64_t request = 0;
  uint64_t round = 0;
  uint32_t rank = 0;
  uint32_t incarnation = 0;
  uint64_t sequence = 0;
  uint32_t payload_crc = 0;
  uint32_t header_crc = 0;

  size_t table_bytes() const { return num_slices * sizeof(SliceEntry); }
  // A table or a body, and so their checksum.
  bool has_fields() const { return num_slices > 0 || body_bytes > 0; }
  bool has_checksum() const { return (flags & kFlagChecksum) != 0; }
  bool is_shared() const { return (flags & kFlagShared) != 0; }
  // What follows on the stream.
  uint64_t streamed_bytes() const { return is_shared() ? 0 : payload_bytes; }
};
inline constexpr size_t kHeaderBytes = 64;
inline constexpr size_t kFieldsCrcBytes = 4;
static_assert(sizeof(Header) == kHeaderBytes);
static_assert(offsetof(Header, payload_bytes) == 16 && offsetof(Header, header_crc) == 60);

// Throws BAD_MAGIC or BAD_VERSION if `prefix`, the first bytes of a header, can't become one of ours.
// Any length will do: a peer that speaks something else is told so by its first bytes.
void check_preamble(std::span<const std::byte> prefix);

// Reads and checks a whole header (`bytes` holds at least kHeaderBytes): the checksum, then the
// preamble, then the op, flags and reserved values. Lengths are left to the decoder, which knows the
// limits. Throws BAD_CHECKSUM, BAD_MAGIC, BAD_VERSION or BAD_HEADER.
Header parse_header(std::span<const std::byte> bytes);

// The CRC-32C that belongs into `header.header_crc`.
uint32_t compute_header_crc(const Header& header);

// The CRC-32C that follows table and body.
uint32_t compute_fields_crc(std::span<const SliceEntry> table, std::span<const std::byte> body);

}  // namespace psstore
