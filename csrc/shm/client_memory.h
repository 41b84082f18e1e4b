// A client's side of what it shares with one shard: the shard's values, which it reads, and the arena that
// it pushes through (shm/push_arena.h). Belongs to one connection and ends with it.
//
// Not thread-safe: one thread at a time, as the session that it is part of.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/descriptor.h"
#include "core/types.h"
#include "shm/memory_file.h"
#include "shm/push_rooms.h"

namespace psstore {

class ClientMemory {
 public:
  // The files that the shard sent; they may be closed afterwards. Throws std::system_error,
  // std::invalid_argument.
  ClientMemory(int values_fd, int pushes_fd, int control_fd);

  // What shows values where they lie (shm/value_view.h) maps them from this file; its number is no other's in
  // this process.
  int values_file() const { return values_file_.get(); }
  uint64_t arena() const { return arena_; }
  const std::byte* values() const { return values_.data(); }
  // Throws Error(BAD_HEADER) if the entry has another size, though not none, or lies outside.
  void check(const SliceEntry& entry, size_t num_bytes) const;

  // Copies the bytes of entry i from where they lie to ranges[i]. Throws Error(BAD_HEADER) if the ranges
  // have other sizes than the entries, or one lies outside: then nothing is copied.
  void read(std::span<const SliceEntry> entries,
            std::span<const std::span<std::byte>> ranges) const;

  // Copies the ranges one after the other to memory that is free; returns where they begin, or nullopt if
  // there is none. The shard says when the frame `number` needs it no more.
  std::optional<uint64_t> write(std::span<const std::span<std::byte>> ranges, uint64_t number);

  // write() of a payload, and its entries saying where they lie then; nullopt: it has to go over the stream, since it is
  // of indices, at which the shard looks, or there is no memory for it.
  std::optional<std::vector<SliceEntry>> place(std::span<const SliceEntry> entries,
                                               std::span<const std::span<std::byte>> ranges,
                                               uint64_t number);

  // Payloads that were read and written so far.
  uint64_t num_reads() const { return num_reads_; }
  uint64_t num_writes() const { return num_writes_; }

 private:
  bool make_present(size_t num_blocks);

  const uint64_t arena_;
  const Descriptor values_file_;
  const Mapping values_;
  const Mapping pushes_;
  PushRooms rooms_;
  mutable uint64_t num_reads_ = 0;
  uint64_t num_writes_ = 0;
  size_t num_present_ = 0;  // blocks from the start on that were populated
};

}  // namespace psstore
