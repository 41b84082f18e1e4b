// A client's book of the arena that it pushes through (shm/push_arena.h): which blocks it may write to.
//
//   free ── take() ──► being written ── sent(number) ──► the shard's, until its control entry says `number`
//    ▲                      │ cancel()                          │
//    └──────────────────────┴───────────────────────────────────┘
//
// Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "shm/memory_file.h"
#include "shm/push_arena.h"

namespace psstore {

class PushRooms {
 public:
  // The control file of an arena of `arena_bytes`. Throws std::system_error, std::invalid_argument.
  PushRooms(int control_fd, size_t arena_bytes);

  static size_t blocks_of(size_t num_bytes) {
    return (num_bytes + kPushBlockBytes - 1) / kPushBlockBytes;
  }

  // Its first block: that of the first gap that is wide enough, so that as little of the arena as possible is
  // ever used. Nullopt: there is none.
  std::optional<size_t> take(size_t num_bytes);
  // The frame `number` says what lies there.
  void sent(size_t first_block, uint64_t number);
  // No frame will.
  void cancel(size_t first_block);

 private:
  struct Room {
    size_t first_block;
    size_t num_blocks;
    std::optional<uint64_t> number;  // of the frame, once there is one
  };

  void take_back();
  std::vector<Room>::iterator find(size_t first_block);

  const size_t num_blocks_;
  const Mapping control_;
  std::vector<Room> rooms_;  // by first block
};

}  // namespace psstore
