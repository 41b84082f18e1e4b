#include "wire/rows_asked.h"

#include <cstring>
#include <string>

#include "core/errors.h"

namespace psstore {
namespace {

uint64_t num_ids(const Frame& frame) {
  const uint64_t most = frame.body.size() / sizeof(uint64_t);
  uint64_t left = most;
  for (const SliceEntry& entry : frame.table) {
    if (entry.version > left) {
      throw Error(ErrorCode::BAD_BODY, "body of PULL_ROWS: it has room for " +
                                           std::to_string(most) +
                                           " ids, and the table asks for more");
    }
    left -= entry.version;
  }
  return most - left;
}

}  // namespace

std::string_view carry_of(const Frame& frame) {
  const std::string_view body = frame.body;
  if (frame.header.op != Op::kPULL_ROWS) return body;
  return body.substr(0, body.size() - num_ids(frame) * sizeof(uint64_t));
}

std::vector<uint64_t> ids_of(const Frame& frame) {
  std::vector<uint64_t> ids(num_ids(frame));
  const size_t num_bytes = ids.size() * sizeof(uint64_t);
  if (num_bytes == 0) return ids;
  std::memcpy(ids.data(), frame.body.data() + frame.body.size() - num_bytes, num_bytes);
  return ids;
}

}  // namespace psstore
