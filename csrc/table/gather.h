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
#include <utility>
#include <vector>

#include "core/buffer.h"
#include "table/schema.h"

namespace psstore {

// From here on a value is shared, not copied. The server's socket write costs about as much per range
// as copying a few KiB, and a copied value does not force the next update out of place.
inline constexpr size_t kSharedValueBytes = 64 << 10;

struct Finding {
  // REQUIRES: travels_as(stored, sent_as), or it is a delta of that encoding.
  Finding(BufferRef found, DType stored, DType sent_as, uint64_t elems)
      : value(std::move(found)),
        dtype(stored),
        wanted(sent_as),
        num_elems(elems),
        num_bytes(encoded_bytes(sent_as, elems)) {}
  // Changes (changes/changes.h) of elements of that dtype.
  static Finding of_changes(BufferRef changes, DType of, uint64_t elems) {
    Finding finding(std::move(changes), of, of, elems);
    finding.num_bytes = finding.value->size();
    finding.is_changes = true;
    return finding;
  }

  BufferRef value;
  DType dtype;
  DType wanted;
  bool is_changes = false;
  uint64_t num_elems;
  size_t num_bytes;

  bool shared() const { return dtype == wanted && num_bytes >= kSharedValueBytes; }
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
