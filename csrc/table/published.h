// What everybody has of a slot who follows it by deltas, which say less than the change of its value.
//
//   value       v5 ─────► v6 ─────► v8        as decisions made it
//   published   p5 ─ d6 ► p6 ─ d8 ► p8        d = encode(v - p), and p + decode(d) is the next p
//
// What an encoding loses stays in v - p, and is in the next delta: error feedback, of the store. A delta is
// made when it is first asked for, once for each version that is asked for at all, and kept until the next:
// whoever asks, and asks again, gets the same bytes and adds them to the same floats. Who has not got the p
// that it begins at gets the whole p. A change that is not finite is not encoded: p becomes v then, and
// everybody gets the whole of it.
//
// Whether a change is finite is known only to who can look at it: this is for values of the host, and of a
// backend that makes_deltas(). Guarded, like all of a slot, by the stripe's lock; readers may hold references beyond it.
#pragma once

#include <cstdint>

#include "core/buffer.h"
#include "core/types.h"
#include "table/backend.h"

namespace psstore {

class Published {
 public:
  // What is sent: a payload of that dtype.
  struct Answer {
    BufferRef buffer;
    DType dtype = DType::kFloat32;
  };

  // `value`: of `num_elems` floats. Shared, not copied: what changes the slot next goes out of place.
  Published(BufferRef value, uint64_t version, uint64_t num_elems);

  // Goes on to that version of the value, by one delta if it is not there yet.
  // REQUIRES: a version is not lower than the one before; `encoding` is kInt8 or kSign.
  void follow(const BufferRef& value, uint64_t version, DType encoding, Backend& backend);

  // For somebody who has what was published before the delta, if `wanted_version` is above the version of
  // that by one, and decodes `encoding`: the delta. For everybody else all of it, as float32.
  Answer answer(uint64_t wanted_version, DType encoding) const;

  size_t num_bytes() const;

 private:
  struct Delta {
    BufferRef payload;  // empty: there is none
    DType encoding = DType::kInt8;
    uint64_t since = 0;  // the version that it begins at
  };

  BufferRef value_;
  uint64_t version_;
  uint64_t num_elems_;
  Delta delta_;
};

}  // namespace psstore
