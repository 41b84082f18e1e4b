// The body of a PULL_ROWS: a Carry (carry.h), and behind it the rows that are asked for.
//
//   | Carry, as that of a PULL | ids: u64 each | marks: u64 each | changes: u32 each |
//
// ids      in the order of the table: how many are an entry's is its `version`
// marks    one for each entry that asks for changes: which marks of its partition its changes are of
// changes  one for each id of these entries: as of which change the asker has the row; 0: it has not
//
// All little-endian; together they are the end of the body.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "wire/frame.h"

namespace psstore {

struct RowsAsked {
  std::vector<uint64_t> ids;
  std::vector<uint64_t> marks;
  std::vector<uint32_t> changes;
};

// The Carry of a PUSH, PULL, NORM, PULL_ROWS or LIST_ROWS. Throws Error(BAD_BODY) if the body is shorter than what its table
// says of rows.
std::string_view carry_of(const Frame& frame);

// Throws the same. REQUIRES: the frame is a PULL_ROWS.
RowsAsked rows_asked(const Frame& frame);

}  // namespace psstore
