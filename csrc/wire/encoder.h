// Writes what precedes a payload: header, slice table and body, with their checksums. The payload follows from
// where it lies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "wire/header.h"

namespace psstore {

// What the caller says about a frame; sizes and checksums are filled in by encode_frame.
struct FrameParts {
  Op op = Op::kERROR;
  bool shared = false;  // kFlagShared
  uint64_t request = 0;
  uint64_t round = 0;
  uint32_t rank = 0;
  uint32_t incarnation = 0;
  uint64_t sequence = 0;
  std::span<const SliceEntry> table = {};
  std::span<const std::byte> body = {};
  uint64_t payload_bytes = 0;
  std::optional<uint32_t> payload_crc = {};

  size_t encoded_bytes() const {
    const size_t fields_bytes = table.size_bytes() + body.size();
    return kHeaderBytes + fields_bytes + (fields_bytes > 0 ? kFieldsCrcBytes : 0);
  }
};

// Throws BAD_ARGUMENT if a peer would refuse the frame: a limit exceeded, a table whose sizes do not
// add up to the payload, or one about parts of slots that the operation is not about.
void check_parts(const FrameParts& parts);

// Writes parts.encoded_bytes() bytes to `out`. REQUIRES: check_parts passed.
void encode_frame(const FrameParts& parts, std::byte* out);
// The same, checked, in bytes of their own.
std::string head_of(const FrameParts& parts);

}  // namespace psstore
