// Requests for data, as they come over a connection.
#pragma once

#include <string>

#include "shard_support.h"
#include "wire_support.h"

namespace psstore::testing {

struct Asked {
  Op op;
  Values slices;  // of a PULL: their values are left out
  uint64_t request = 1;
  uint64_t sequence = 0;
  uint32_t incarnation = 0;
  std::string body = "";
};

// The body of a PUSH or PULL: it brings decisions up to that number, and waits for so long.
inline std::string carry(uint64_t newest, double wait_s = 0.0) {
  const struct {
    uint64_t newest, at_least = 0, scaled = 0;
    double wait_s, factor = 1.0;
  } fixed{.newest = newest, .wait_s = wait_s};
  std::string body(reinterpret_cast<const char*>(&fixed), sizeof fixed);
  return newest == 0 ? body : body + "decisions";
}

inline Bytes wire(const Asked& asked) {
  std::vector<SliceEntry> table = entries_for(asked.slices);
  Bytes payload;
  for (size_t i = 0; i < table.size(); ++i) {
    if (asked.op == Op::kPULL) {
      table[i].num_bytes = 0;
    } else {
      append(payload, std::as_bytes(std::span(asked.slices[i].second)));
    }
  }
  const FrameParts parts{.op = asked.op,
                         .request = asked.request,
                         .round = 1,
                         .incarnation = asked.incarnation,
                         .sequence = asked.sequence,
                         .table = table,
                         .body = std::as_bytes(std::span(asked.body)),
                         .payload_bytes = payload.size()};
  check_parts(parts);
  Bytes bytes(parts.encoded_bytes());
  encode_frame(parts, bytes.data());
  append(bytes, payload);
  return bytes;
}

}  // namespace psstore::testing
