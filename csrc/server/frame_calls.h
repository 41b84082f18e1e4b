// A frame's request, put to the shard: entries out of the frame, the reply's table out of what came back.
//
// The shard speaks of slices, the wire of frames; here is the step between them and nothing else.
#pragma once

#include <string>
#include <vector>

#include "shard/shard.h"
#include "wire/frame.h"

namespace psstore {

// Throws Error(BAD_ARGUMENT) for an operation that carries nothing to write.
WriteKind write_kind(const Frame& frame);

// Memory for the payload that `frame` announces; its table then says what may be written. Empty if
// nothing may be, or if the payload is in shared memory already.
BufferRef admit(Shard& shard, Frame& frame);

// Carries out a write that was admitted and whose payload is there; `client` is who numbers ASSIGN, ADD
// and RESTORE. Returns the reply's table. Throws what the shard throws, and then nothing has changed.
SliceTable write(Shard& shard, const Frame& frame, const std::string& client);

// Repeats a write that another shard with the same table has carried out: entries that it refused are left out.
// Throws Error(INTERNAL) if this one refuses another entry.
void repeat(Shard& shard, const Frame& frame, const std::string& client);

struct ReadReply {
  SliceTable table;
  Shard::Reply values;
};

// Shard::read of a PULL, Shard::read_rows of a PULL_ROWS, Shard::list_rows of a LIST_ROWS, Shard::norms of a
// NORM.
ReadReply read(Shard& shard, const Frame& frame, Shard::ReadOptions options = {});

// The entries of a frame as they may go into a reply: what lies in shared memory is attached already.
std::vector<SliceEntry> entries_of(const Frame& frame);

}  // namespace psstore
