// What everybody has of a slot who follows it by deltas, which say less than the change of its value.
//
//   value       v5 ─────► v6 ─────► v8        as decisions made it
//   published   p5 ─ d6 ► p6 ─ d8 ► p8        d = encode(v - p), and p + decode(d) is the next p
//
// What an encoding loses stays in v - p, and is in the next delta: error feedback, of the store. A delta is
// made when it is first asked for, once for each version that is asked for at all, and kept until the next:
// whoever asks, and asks again, gets the same bytes and adds them to the same floats. Who has not got the p
// that it begins at gets the whole p. A change that is not finite can't be said by a delta: p becomes v then, and
// everybody gets the whole of it.
//
// A shard that goes on for another process has not published what that one has. Somebody may have the same version of
// that one's p, and the first delta here would be added to other floats: everybody gets the whole in its place.
//
// Whether a change is finite is known to who can look at it. A device sees to it that p is right without a word to
// the host, which hears of it from the delta itself, when that has come and is to be sent: then it asks for the whole.
//
// Guarded, like all of a slot, by the stripe's lock; readers may hold references beyond it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "core/buffer.h"
#include "core/types.h"
#include "table/backend.h"
#include "table/reservation.h"

namespace psstore {

class Published {
 public:
  // What is sent: a payload of that dtype.
  struct Answer {
    BufferRef buffer;
    DType dtype = DType::kFloat32;
  };

  // `value`: of `num_elems` floats. Shared, not copied: what changes the slot next goes out of place.
  // `goes_on`: another process may have published that version before.
  // Throws Error(OUT_OF_MEMORY) if the backend has no room for what is kept of it from now on.
  Published(BufferRef value, uint64_t version, uint64_t num_elems, bool goes_on,
            const std::shared_ptr<Backend>& backend);

  // Goes on to that version of the value, by one delta if it is not there yet.
  // REQUIRES: a version is not lower than the one before; `encoding` is kInt8 or kSign.
  void follow(const BufferRef& value, uint64_t version, DType encoding, Backend& backend);

  // For somebody who has what was published before the delta, if `wanted_version` is above the version of
  // that by one, and decodes `encoding`: the delta. For everybody else all of it, as float32.
  Answer answer(uint64_t wanted_version, DType encoding) const;
  Answer whole() const { return {value_, DType::kFloat32}; }

  size_t num_bytes() const;

 private:
  struct Delta {
    BufferRef payload;  // empty: there is none
    DType encoding = DType::kInt8;
    uint64_t since = 0;  // the version that it begins at
  };

  std::unique_ptr<Reservation> reserved_;
  BufferRef value_;
  uint64_t version_;
  uint64_t num_elems_;
  std::optional<uint64_t> elsewhere_;  // the version of which somebody may have another p
  Delta delta_;
};

// Whether all the deltas among what was read say their changes, now that they can be looked at.
bool say_changes(std::span<const SliceEntry> entries, std::span<const std::byte> payload);

}  // namespace psstore
