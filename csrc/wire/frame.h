// One message as the decoder found it, and as the shard reads it.
//
// Ownership: shared between the decoder and whoever handles the message. A frame with a payload is
// handed out twice, the same object each time: with complete == false, so that a destination can be
// chosen, and with complete == true when the payload lies there. In between only the decoder writes to
// it, and only to `complete` and `payload`. Not thread-safe: one connection, one thread at a time.
#pragma once

#include <string>

#include "core/buffer.h"
#include "wire/header.h"
#include "wire/slice_table.h"

namespace psstore {

struct Frame {
  Header header;
  SliceTable table;  // checked: its sizes add up to header.payload_bytes unless it is empty
  std::string body;  // MessagePack, not decoded here
  bool complete = false;
  BufferRef payload;  // set if the payload was accepted into a Buffer
};

}  // namespace psstore
