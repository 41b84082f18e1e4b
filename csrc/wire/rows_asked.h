// The body of a PULL_ROWS: a Carry (carry.h), and behind it the ids of the rows that are asked for.
//
//   | Carry, as that of a PULL | ids: u64 each, little-endian, in the order of the table |
//
// How many are an entry's is its `version`. Together they are the end of the body.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "wire/frame.h"

namespace psstore {

// The Carry of a PUSH, PULL, NORM, PULL_ROWS or LIST_ROWS. Throws Error(BAD_BODY) if the body is shorter than the ids.
std::string_view carry_of(const Frame& frame);

// Throws the same. REQUIRES: the frame is a PULL_ROWS.
std::vector<uint64_t> ids_of(const Frame& frame);

}  // namespace psstore
