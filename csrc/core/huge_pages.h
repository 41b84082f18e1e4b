// Blocks of memory in huge pages, where the system has them (Linux: transparent huge pages, `always` or `madvise`).
//
// For what is read all over: of pages of 4 KiB a processor remembers where so few are that each such read has to ask the
// page tables first, which are not in the cache either. Blocks lie one behind the other in large regions; what is given
// back is taken again by a block of its size, which costs addresses only.
#pragma once

#include <cstddef>
#include <map>
#include <vector>

#include "core/buffer.h"
#include "core/mutex.h"

namespace psstore {

class HugePages : public BlockSource {
 public:
  HugePages() = default;
  HugePages(const HugePages&) = delete;
  HugePages& operator=(const HugePages&) = delete;
  ~HugePages() override;

  std::byte* take(size_t num_bytes) noexcept override;
  void give_back(std::byte* block, size_t num_bytes) noexcept override;

 private:
  struct Region {
    std::byte* begin;
    size_t num_bytes;
  };

  std::byte* take_new(size_t num_bytes) REQUIRES(mutex_);

  Mutex mutex_;
  std::vector<Region> regions_ GUARDED_BY(mutex_);
  size_t num_used_ GUARDED_BY(mutex_) = 0;  // bytes of the last region
  std::map<size_t, std::vector<std::byte*>> given_back_ GUARDED_BY(mutex_);  // by size
};

}  // namespace psstore
