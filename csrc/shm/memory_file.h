// Memory that processes share: files without a name, of a fixed size, gone with the last process that has
// them open or mapped, however that process ended.
//
// Touching a page of such a file for which there is no memory would be a SIGBUS. So a range is populated
// before it is used, which fails with an error instead, and the seals keep everybody from shrinking a file
// or from punching holes into one that others write to. Needs Linux 5.14.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "core/descriptor.h"

namespace psstore {

enum class Access { kRead, kWrite };

// A new file of `num_bytes` zeros, none of which has memory yet, that can't be resized any more. Throws
// std::system_error.
Descriptor make_memory_file(const char* name, size_t num_bytes);
// The same file, but for reading: a mapping of it can't be written to. Throws std::system_error.
Descriptor reopen_readonly(const Descriptor& file);
// From now on nobody can make a new writable mapping, write, or punch holes; mappings that there are stay.
void seal_writing(const Descriptor& file);
// Size of a file that somebody sent us. Throws std::system_error, std::invalid_argument if it could shrink.
size_t size_of_sealed(int fd);

// A shared mapping of a whole file. A forked child does not have it.
class Mapping {
 public:
  // Throws std::system_error.
  Mapping(int fd, size_t num_bytes, Access access);
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

  // Makes sure that the range, of whole pages, can be touched. False: there is no memory for it.
  bool populate(size_t offset, size_t num_bytes) const noexcept;

 private:
  std::byte* data_;
  size_t size_;
  Access access_;
  pid_t process_;  // a forked child must not unmap what may be something else there
};

// Which parts of a mapping have been populated: each is once, together with what is beside it. Not thread-safe.
class PopulatedParts {
 public:
  static constexpr size_t kBytes = 64 << 10;

  // The mapping outlives this.
  explicit PopulatedParts(const Mapping& memory)
      : memory_(memory), parts_((memory.size() + kBytes - 1) / kBytes) {}

  // Makes sure that the range, not empty, can be touched. False: there is no memory for it.
  bool populate(size_t offset, size_t num_bytes);

 private:
  const Mapping& memory_;
  std::vector<bool> parts_;
};

size_t page_bytes();
// The size rounded up to whole pages, in bytes.
size_t whole_pages(size_t num_bytes);
// All memory of this machine, in bytes: what an arena never needs more than.
size_t machine_memory_bytes();

}  // namespace psstore
