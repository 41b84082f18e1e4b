// The clock by which deadlines and waits are told.
#pragma once

#include <chrono>

namespace psstore {

// In seconds; that of Python's time.monotonic, and so of its event loops.
inline double monotonic_s() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

}  // namespace psstore
