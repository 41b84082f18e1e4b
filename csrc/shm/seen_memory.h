// What a standby sees of a file in memory that its shard reads contributions from: what clients push through, and what the
// shard has received. Records say where a payload lies there, and it is staged there; the shard keeps it as it is until it
// has heard that nobody needs it here (server/replication.h).
//
//   offsets in records   [address, address + size of the file)
//
// Ownership: a range keeps the mapping alive, as a contribution may outlive the connection that brought it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/buffer.h"
#include "core/mutex.h"
#include "core/types.h"
#include "shm/memory_file.h"

namespace psstore {

class SeenMemory : public BufferOwner, public std::enable_shared_from_this<SeenMemory> {
 public:
  // The file may be closed afterwards. Throws std::system_error, std::invalid_argument.
  static std::shared_ptr<SeenMemory> map(int file, uint64_t address);
  SeenMemory(const SeenMemory&) = delete;
  SeenMemory& operator=(const SeenMemory&) = delete;

  uint64_t address() const { return address_; }
  // Whether a record of these entries is meant to lie here.
  bool begins_here(std::span<const SliceEntry> entries) const {
    return !entries.empty() && entries.front().offset - address_ < memory_.size();
  }
  // The payload of the record with that number, whose slices lie one after the other. Throws Error(BAD_HEADER) if it ends
  // beyond the file, or is empty; Error(OVERLOADED) if there is no memory for the mapping.
  BufferRef range_of(std::span<const SliceEntry> entries, uint64_t number);
  // The numbers of records whose ranges are needed no more, each once.
  std::vector<uint64_t> take_released();
  // Nothing more will lie here. It is over once all that has lain here was told.
  void close();
  bool is_over();

 private:
  struct Range;

  SeenMemory(int file, uint64_t address);
  void release(Buffer* buffer) noexcept override;

  const Mapping memory_;
  const uint64_t address_;

  Mutex mutex_;
  PopulatedParts mapped_ GUARDED_BY(mutex_);
  size_t num_out_ GUARDED_BY(mutex_) = 0;  // ranges
  std::vector<uint64_t> released_ GUARDED_BY(mutex_);
  bool closed_ GUARDED_BY(mutex_) = false;
};

}  // namespace psstore
