// What each worker was sent last of a slot's value: its base, at which the gradients that it pushes next are taken.
//
// A base is a reference. It costs nothing while it is the value, or another worker's base, and the memory of a value once
// a step has gone on from it. So a slot keeps at most as many values beside its own as there are workers who were sent one;
// room for these is reserved. Memory that is nobody's base any more is kept for the next value.
//
//   rank 0 was sent v7    value ─► [ v7 ] ◄─ base of 0
//   a step                value ─► [ v8 ]             [ v7 ] ◄─ base of 0
//   rank 0 is sent v8     value ─► [ v8 ] ◄─ base of 0    spare ─► [    ] where v9 goes
//
// Guarded, like all of a slot, by the stripe's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/buffer.h"
#include "table/backend.h"
#include "table/decision.h"

namespace psstore {

class Bases {
 public:
  struct Base {
    Life life;
    BufferRef value;
  };

  // Whether a life of that rank was ever sent a value.
  bool has_rank(uint32_t rank) const;
  // That life of a rank was sent this value. Ignored of a life before one that is known.
  void note(const Life& life, BufferRef value);
  // What it was sent last; empty: nobody knows.
  BufferRef of(const Life& life) const;
  // Nobody's gradients are taken any more at what was sent.
  void forget();

  // Memory for the next value, beside one that is somebody's base: as far as possible out of what is reserved for the slot.
  BufferRef next(size_t num_bytes, uint64_t& reserved_bytes, Backend& backend);
  // How many buffers came out of that.
  size_t num_drawn() const { return num_drawn_; }

  // Ascending by rank, of each that was sent one; empty: that is forgotten.
  const std::vector<Base>& all() const { return by_rank_; }
  // How many buffers there are beside the value's.
  size_t num_buffers(const BufferRef& value) const;

 private:
  // It was a base: its memory is for the next value, if nobody else refers to it.
  void give_up(BufferRef value);

  size_t num_drawn_ = 0;
  std::vector<Base> by_rank_;
  std::vector<BufferRef> spare_;
};

}  // namespace psstore
