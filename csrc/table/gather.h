// Turns the values and state buffers that a pull found into few ranges of memory for one gathering write.
//
//   found     big | small | small | bf16 wanted | big
//   pieces    ref |      one new buffer         | ref
//
// A large value is handed out as a reference: no copy, and the next update goes out of place while it is
// held. Small ones would cost more as ranges of their own than as a copy, and those wanted in another
// encoding have to be written anew: runs of both share one buffer. No locks: the references that a
// finding holds keep its bytes as they were when it was found.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "core/buffer.h"
#include "table/schema.h"

namespace psstore {

// From here on a value is shared, not copied. The server's socket write costs about as much per range
// as copying a few KiB, and a copied value does not force the next update out of place.
inline constexpr size_t kSharedValueBytes = 64 << 10;

struct Finding {
  BufferRef value;
  DType dtype = DType::kFloat32;   // of the value; or an encoding, that of a delta
  DType wanted = DType::kFloat32;  // travels_as(dtype, wanted)
  uint64_t num_elems = 0;
  std::optional<uint64_t> changes_bytes = {};  // it is changes (changes/changes.h) of that dtype

  size_t num_bytes() const { return changes_bytes.value_or(encoded_bytes(wanted, num_elems)); }
  bool shared() const { return dtype == wanted && num_bytes() >= kSharedValueBytes; }
};

// A range of a reply's payload. The holder must not write to it.
struct Piece {
  BufferRef buffer;
  size_t num_bytes = 0;
};

// The findings' values in their order, none of the pieces empty. What is written anew gets memory of at
// least `smallest_block` bytes.
std::vector<Piece> gather(const std::vector<Finding>& findings, BufferPool& pool,
                          size_t smallest_block = 0);

}  // namespace psstore
