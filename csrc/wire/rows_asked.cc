#include "wire/rows_asked.h"

#include <cstring>
#include <string>

#include "core/errors.h"

namespace psstore {
namespace {

struct Sizes {
  uint64_t num_ids = 0;
  uint64_t num_marks = 0;
  uint64_t num_changes = 0;

  uint64_t num_bytes() const {
    return (num_ids + num_marks) * sizeof(uint64_t) + num_changes * sizeof(uint32_t);
  }
};

Sizes sizes_of(const Frame& frame) {
  Sizes sizes;
  for (const SliceEntry& entry : frame.table) {
    const uint64_t left = frame.body.size() - sizes.num_bytes();
    const bool are_too_many = entry.version > left / sizeof(uint64_t);
    if (!are_too_many) sizes.num_ids += entry.version;
    if (!are_too_many && is_of_changes(entry.dtype)) {
      ++sizes.num_marks;
      sizes.num_changes += entry.version;
    }
    if (are_too_many || sizes.num_bytes() > frame.body.size()) {
      throw Error(ErrorCode::BAD_BODY, "body of PULL_ROWS: it has " +
                                           std::to_string(frame.body.size()) +
                                           " bytes, and the ids that the table asks for, with"
                                           " what is said of them, are more");
    }
  }
  return sizes;
}

template <typename T>
std::vector<T> take_values(std::string_view& from, uint64_t count) {
  std::vector<T> values(count);
  const size_t num_bytes = count * sizeof(T);
  if (num_bytes > 0) std::memcpy(values.data(), from.data(), num_bytes);
  from.remove_prefix(num_bytes);
  return values;
}

}  // namespace

std::string_view carry_of(const Frame& frame) {
  const std::string_view body = frame.body;
  if (frame.header.op != Op::kPULL_ROWS) return body;
  return body.substr(0, body.size() - sizes_of(frame).num_bytes());
}

RowsAsked rows_asked(const Frame& frame) {
  const Sizes sizes = sizes_of(frame);
  std::string_view left = frame.body;
  left.remove_prefix(left.size() - sizes.num_bytes());
  RowsAsked asked;
  asked.ids = take_values<uint64_t>(left, sizes.num_ids);
  asked.marks = take_values<uint64_t>(left, sizes.num_marks);
  asked.changes = take_values<uint32_t>(left, sizes.num_changes);
  return asked;
}

}  // namespace psstore
