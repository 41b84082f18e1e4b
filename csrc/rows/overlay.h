// The rows of a partition, out of those that it had once and of what changed since: what a checkpoint is read by that has
// changes alone.
//
//   changes   | ids: n × u64 | record record ...         of the n rows that there are, and of those that changed
//
// Both are in the order in which the rows lay, and so is what comes of them: it is what a copy of all records would have been.
#pragma once

#include <cstddef>
#include <span>

namespace psstore {

// Writes the records of all n rows. `base`: records that there were once. Throws Error(BAD_ARGUMENT), with anything written,
// if a row is in neither, or they are no records of that size.
void overlay_rows(std::span<const std::byte> base, std::span<const std::byte> changes,
                  size_t record_bytes, std::span<std::byte> records);

}  // namespace psstore
