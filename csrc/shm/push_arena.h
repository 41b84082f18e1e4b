// The shard's side of the memory that one client's connection pushes through: the client writes its values
// there, and a frame says where they lie instead of bringing them. They are staged where they lie.
//
//   arena     a file that the client maps for writing, the shard for reading, or memory of a device that
//             they share; a frame's slices lie one after the other, from the start of a block of
//             kPushBlockBytes on
//   control   a file the other way round: for each block the number of the last frame that began there and
//             that the shard needs no more. That is how a client learns that blocks are free again.
//
// A standby of this host maps the file, too (shm/seen_memory.h), and then the shard needs a range until its standby has let
// go of it.
//
// A client that writes to what it has pushed changes its own gradients, in time or half way, and nothing
// else: bytes that are more than numbers must not be read from here (see range_of). What lies on a device
// the host does not look at at all.
// Ownership: a range keeps the arena alive, as a contribution may outlive the connection that brought it. Memory of a
// device takes longer: a client that has lost its connection may have queued a copy to it that is not done, and the
// memory would be somebody else's by then. The client keeps its mapping of the control file until such copies are done,
// or ends: so the shard asks whether that file is still open elsewhere (is_let_go).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/buffer.h"
#include "core/mutex.h"
#include "core/types.h"
#include "shm/memory_file.h"

namespace psstore {

// Where in the arena a frame may begin.
inline constexpr size_t kPushBlockBytes = 64 << 10;

// A frame with a smaller payload brings it over the stream: protocol/sharing.py says why.
inline constexpr size_t kSharedFromBytes = 512 << 10;

// Control entries, one for each block, as they lie in the file.
inline constexpr size_t control_bytes(size_t arena_bytes) {
  return arena_bytes / kPushBlockBytes * sizeof(uint64_t);
}

// The entries of a payload that begins there, its slices one after the other.
inline std::vector<SliceEntry> laid_out(std::span<const SliceEntry> entries, uint64_t offset) {
  std::vector<SliceEntry> made(entries.begin(), entries.end());
  for (SliceEntry& entry : made) {
    entry.offset = offset;
    offset += entry.num_bytes;
  }
  return made;
}

class PushArena : public BufferOwner, public std::enable_shared_from_this<PushArena> {
 public:
  // `num_bytes` is rounded down to whole blocks. Throws std::system_error.
  static std::shared_ptr<PushArena> create(size_t num_bytes);
  // Over memory of a device, whose size is whole blocks and that begins at `address`: there is no file of it,
  // nor a seal. `reservation` goes with it.
  static std::shared_ptr<PushArena> create_over(BufferRef memory, uint64_t address,
                                                std::shared_ptr<const void> reservation = nullptr);
  PushArena(const PushArena&) = delete;
  PushArena& operator=(const PushArena&) = delete;

  // What the client maps: the first for writing, the second for reading.
  const Descriptor& file() const { return file_; }
  size_t num_bytes() const { return num_bytes_; }
  const Descriptor& control_file() const { return readonly_control_file_; }
  // The client has mapped it: from now on nobody can punch holes into the file that the shard reads.
  void seal() {
    if (!on_device_) seal_writing(file_);
  }

  // Whether its client, whose connection is lost, can write no more to memory that others are given next. REQUIRES:
  // nobody is handed the files from now on.
  bool is_let_go();

  // Whether a frame of these entries may be meant to lie here.
  bool begins_here(std::span<const SliceEntry> entries) const {
    return !entries.empty() && entries.front().offset - address_ < num_bytes_;
  }
  // The payload of a frame with that number. Throws Error(BAD_HEADER) if its slices do not lie one after
  // the other in the arena from a block's start on, or hold what has to be looked at; Error(OVERLOADED) if
  // there is no memory for them.
  BufferRef range_of(std::span<const SliceEntry> entries, uint64_t number);
  // Where a range of it begins, from its start on; nullopt: those bytes lie elsewhere.
  std::optional<uint64_t> offset_of(const Buffer& range) const;

 private:
  struct Range;

  explicit PushArena(size_t num_bytes);
  PushArena(BufferRef on_device, uint64_t address, std::shared_ptr<const void> reservation);
  bool may_hold(DType dtype) const;
  void release(Buffer* buffer) noexcept override;

  const size_t num_bytes_;
  const Descriptor file_;  // none: on a device
  const std::shared_ptr<const void> reservation_;
  const BufferRef on_device_;
  const uint64_t address_ = 0;           // what offsets begin with
  const std::optional<Mapping> memory_;  // of the file
  std::byte* const data_;
  const Descriptor control_file_;
  // On a device: locked for as long as somebody has it open or mapped.
  Descriptor readonly_control_file_;
  const Mapping control_;

  Mutex mutex_;
  std::optional<PopulatedParts> present_ GUARDED_BY(mutex_);  // none: on a device
};

}  // namespace psstore
