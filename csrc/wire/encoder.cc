#include "wire/encoder.h"

#include <cstring>
#include <string>

#include "wire/limits.h"
#include "wire/slice_table.h"

namespace psstore {
namespace {

void check_fits(const char* what, uint64_t value, uint64_t limit) {
  if (value <= limit) return;
  throw Error(ErrorCode::BAD_ARGUMENT, std::string("a frame of ") + std::to_string(value) + ' ' +
                                           what + ": at most " + std::to_string(limit) +
                                           " fit in one");
}

// memcpy's arguments must not be null, which an empty span's may be.
std::byte* append(std::byte* out, std::span<const std::byte> bytes) {
  if (!bytes.empty()) std::memcpy(out, bytes.data(), bytes.size());
  return out + bytes.size();
}

}  // namespace

void check_parts(const FrameParts& parts) {
  check_fits("slices", parts.table.size(), kMaxSlices);
  check_fits("body bytes", parts.body.size(), kMaxBodyBytes);
  check_fits("payload bytes", parts.payload_bytes, kMaxPayloadBytes);
  if (!parts.table.empty() && total_bytes(parts.table) != parts.payload_bytes) {
    throw Error(ErrorCode::BAD_ARGUMENT, "a payload of " + std::to_string(parts.payload_bytes) +
                                             " bytes with a table that says " +
                                             std::to_string(total_bytes(parts.table)));
  }
  for (const SliceEntry& entry : parts.table) {
    if (may_be_about(parts.op, entry.part)) continue;
    throw Error(ErrorCode::BAD_ARGUMENT, "operation " + std::to_string(static_cast<int>(parts.op)) +
                                             " can't be about part " + std::to_string(entry.part) +
                                             " of key " + std::to_string(entry.key) +
                                             ": only PULL, RESTORE and LIST_ROWS are about parts");
  }
}

void encode_frame(const FrameParts& parts, std::byte* out) {
  Header header;
  header.op = parts.op;
  header.flags = parts.payload_crc ? kFlagChecksum : parts.shared ? kFlagShared : uint16_t{0};
  header.num_slices = static_cast<uint32_t>(parts.table.size());
  header.body_bytes = static_cast<uint32_t>(parts.body.size());
  header.payload_bytes = parts.payload_bytes;
  header.request = parts.request;
  header.round = parts.round;
  header.rank = parts.rank;
  header.incarnation = parts.incarnation;
  header.sequence = parts.sequence;
  header.payload_crc = parts.payload_crc.value_or(0);
  header.header_crc = compute_header_crc(header);
  out = append(out, std::as_bytes(std::span(&header, 1)));
  out = append(out, std::as_bytes(parts.table));
  out = append(out, parts.body);
  if (!header.has_fields()) return;
  const uint32_t fields_crc = compute_fields_crc(parts.table, parts.body);
  append(out, std::as_bytes(std::span(&fields_crc, 1)));
}

std::string head_of(const FrameParts& parts) {
  check_parts(parts);
  std::string bytes(parts.encoded_bytes(), '\0');
  encode_frame(parts, reinterpret_cast<std::byte*>(bytes.data()));
  return bytes;
}

}  // namespace psstore
