#include "core/huge_pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <new>

namespace psstore {
namespace {

constexpr size_t kPageBytes = 4096;
constexpr size_t kHugePageBytes = 2u << 20;
// Of addresses: what no block is in takes no memory.
constexpr size_t kRegionBytes = 64u << 20;

constexpr size_t rounded_up(size_t num_bytes, size_t unit) {
  return (num_bytes + unit - 1) / unit * unit;
}

}  // namespace

HugePages::~HugePages() {
  for (const Region& region : regions_) munmap(region.begin, region.num_bytes);
}

std::byte* HugePages::take(size_t num_bytes) noexcept {
  const size_t size = rounded_up(num_bytes, kPageBytes);
  const MutexLock lock(mutex_);
  const auto known = given_back_.find(size);
  if (known != given_back_.end() && !known->second.empty()) {
    std::byte* const block = known->second.back();
    known->second.pop_back();
    return block;
  }
  try {
    return take_new(size);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

std::byte* HugePages::take_new(size_t num_bytes) {
  if (regions_.empty() || regions_.back().num_bytes - num_used_ < num_bytes) {
    regions_.reserve(regions_.size() + 1);
    const size_t size = std::max(kRegionBytes, rounded_up(num_bytes, kHugePageBytes));
    const size_t mapped_bytes = size + kHugePageBytes;  // so that one that is aligned lies in it
    void* const mapped = mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) return nullptr;
    auto* const first = static_cast<std::byte*>(mapped);
    const size_t before = rounded_up(reinterpret_cast<uintptr_t>(first), kHugePageBytes) -
                          reinterpret_cast<uintptr_t>(first);
    if (before > 0) munmap(first, before);
    munmap(first + before + size, mapped_bytes - before - size);
    madvise(first + before, size, MADV_HUGEPAGE);  // a system without them goes on with others
    regions_.push_back({first + before, size});
    num_used_ = 0;
  }
  std::byte* const block = regions_.back().begin + num_used_;
  num_used_ += num_bytes;
  return block;
}

void HugePages::give_back(std::byte* block, size_t num_bytes) noexcept {
  const size_t size = rounded_up(num_bytes, kPageBytes);
  madvise(block, size, MADV_DONTNEED);  // if it fails the memory stays until it is taken again
  const MutexLock lock(mutex_);
  try {
    given_back_[size].push_back(block);
  } catch (const std::bad_alloc&) {
    // Addresses are lost, no memory.
  }
}

}  // namespace psstore
