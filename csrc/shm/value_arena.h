// Where a shard's large buffers lie if clients on its machine may read them: one file in memory that they
// map for reading. A reply then says where a value lies instead of bringing it.
//
//   file    [ block | block |   hole   | block |            never used             ]
//                                ▲ was given back             ▲ end_
//
// The file is as large as the machine's memory and sparse: what is not in use has none. Blocks of one size
// take each other's place; a range that was given back is of that size for ever, which costs addresses only.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "core/buffer.h"
#include "core/mutex.h"
#include "shm/memory_file.h"

namespace psstore {

class ValueArena : public SharedSource {
 public:
  // Throws std::system_error, also if the system is too old to populate a range.
  explicit ValueArena(size_t num_bytes = machine_memory_bytes());

  std::byte* take(size_t num_bytes) noexcept override;
  void give_back(std::byte* block, size_t num_bytes) noexcept override;

  // In the file.
  std::optional<uint64_t> offset_of(const std::byte* data) const override;
  // What a client maps.
  const Descriptor& readonly_file() const { return readonly_file_; }

 private:
  std::optional<size_t> find_range(size_t num_bytes) noexcept;
  void keep_range(size_t offset, size_t num_bytes) noexcept;

  const Descriptor file_;
  const Descriptor readonly_file_;
  const Mapping memory_;

  Mutex mutex_;
  size_t end_ GUARDED_BY(mutex_) = 0;
  std::map<size_t, std::vector<size_t>> given_back_ GUARDED_BY(mutex_);  // size -> offsets
};

}  // namespace psstore
