// Values of shards in one piece each, for a client that reads them where they lie: whole pages of a shard's
// arena are mapped side by side, in whatever order they lie there, and what is no whole page is copied.
//
//   arena     [   | slice 1 |    | slice 0 | slice 2 |  ]     csrc/shm/value_arena.h
//                      ╎            ╎          ╎
//   view      [ slice 0 | slice 1 | slice 2 ]                 for reading only
//
// A shard that steps in place leaves values where they were, and mapping them again is then nothing to do.
// The bytes can be read as long as the object is there, also when a forked child has it, or the shard has
// ended. What they are is sure only while the shard lends them.
//
// Not thread-safe, but for reading.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/types.h"
#include "shm/client_memory.h"

namespace psstore {

class ValueView {
 public:
  struct Part {
    size_t begin;
    size_t num_bytes;
  };

  // What there will be, in any order, with or without gaps. Zeros until then. Throws
  // std::invalid_argument, std::system_error.
  explicit ValueView(std::vector<Part> parts);
  ValueView(const ValueView&) = delete;
  ValueView& operator=(const ValueView&) = delete;
  ~ValueView();

  const std::byte* data() const { return data_; }
  size_t num_bytes() const { return num_bytes_; }
  // Of arenas. What lies together there and here has one.
  size_t num_mappings() const { return num_mappings_; }

  // How many of the entries are shown already, as `show` would.
  size_t shown(const ClientMemory& memory, std::span<const SliceEntry> entries, size_t first) const;
  // Part first + i is what entry i says of that memory. Throws Error(BAD_HEADER) if the entries are of other
  // sizes, or lie outside: then nothing is shown. Throws std::system_error.
  void show(const ClientMemory& memory, std::span<const SliceEntry> entries, size_t first);
  // Memory of its own for these parts, to be filled. Throws std::system_error.
  std::vector<std::span<std::byte>> own(size_t first, size_t count);

 private:
  // What a part shows: an arena's range, or memory of its own (arena 0).
  struct Shown {
    uint64_t arena = 0;
    uint64_t offset = 0;
    bool operator==(const Shown&) const = default;
  };

  bool may_be_mapped(size_t part, uint64_t offset) const;
  bool map(const ClientMemory& memory, std::span<const SliceEntry> entries, size_t first,
           size_t begin, size_t end);
  void copy(const ClientMemory& memory, const SliceEntry& entry, size_t part);
  void make_own(size_t part);
  bool follows(size_t part) const;
  size_t mappings(size_t begin, size_t end) const;
  bool place(size_t begin, size_t num_bytes, int fd, uint64_t offset);

  const std::vector<Part> parts_;
  std::vector<size_t> room_;  // bytes from each part's begin to the next one's, or to the end
  std::vector<Shown> shown_;
  size_t num_bytes_ = 0;
  size_t num_mappings_ = 0;
  std::byte* data_ = nullptr;
};

}  // namespace psstore
