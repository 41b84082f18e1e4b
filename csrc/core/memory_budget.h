// How much of some memory a shard may take, and how much of that is spoken for: what is in use, and what was
// reserved for later. Whoever asks for more than is left is told so before anything changes; main memory that
// is overdrawn ends the process instead.
//
// Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "core/errors.h"

namespace psstore {

inline std::string in_mib(uint64_t num_bytes) {
  return std::to_string((num_bytes + (1u << 20) - 1) >> 20) + " MiB";
}

inline constexpr uint64_t kNoMemoryLimit = std::numeric_limits<uint64_t>::max();

class MemoryBudget {
 public:
  // For messages. `memory`: whose it is; `advice`: what to do if there is too little.
  MemoryBudget(uint64_t max_bytes, std::string memory, std::string advice)
      : max_bytes_(max_bytes), memory_(std::move(memory)), advice_(std::move(advice)) {}

  uint64_t max_bytes() const { return max_bytes_; }
  uint64_t taken_bytes() const { return taken_bytes_.load(std::memory_order_relaxed); }
  uint64_t left_bytes() const { return max_bytes_ - taken_bytes(); }

  // Throws Error(OUT_OF_MEMORY) that says what to do, with nothing taken.
  void take(uint64_t num_bytes) {
    uint64_t taken = taken_bytes();
    do {
      if (num_bytes > max_bytes_ - taken) refuse(num_bytes, max_bytes_ - taken);
    } while (
        !taken_bytes_.compare_exchange_weak(taken, taken + num_bytes, std::memory_order_relaxed));
  }
  // REQUIRES: so much is taken.
  void give_back(uint64_t num_bytes) noexcept {
    taken_bytes_.fetch_sub(num_bytes, std::memory_order_relaxed);
  }

 private:
  [[noreturn]] void refuse(uint64_t num_bytes, uint64_t left_bytes) const {
    throw Error(ErrorCode::OUT_OF_MEMORY,
                in_mib(num_bytes) +
                    " for values, rule state or pushes do not fit: this shard may use " +
                    in_mib(max_bytes_) + " of " + memory_ + ", and " + in_mib(left_bytes) +
                    " of that are left; " + advice_);
  }

  const uint64_t max_bytes_;
  const std::string memory_;
  const std::string advice_;
  std::atomic<uint64_t> taken_bytes_{0};
};

}  // namespace psstore
