// The clock by which deadlines and waits are told.
#pragma once

#include <ctime>

#include <chrono>

namespace psstore {

// In seconds; that of Python's time.monotonic, and so of its event loops.
inline double monotonic_s() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

// How long the machine has been suspended, as a virtual one is: for so long that clock stood still, and others went on. Of
// a thread that is put off between the two readings it is less.
inline double suspended_s() {
  timespec with{}, without{};
  clock_gettime(CLOCK_BOOTTIME, &with);
  clock_gettime(CLOCK_MONOTONIC, &without);
  return static_cast<double>(with.tv_sec - without.tv_sec) +
         1e-9 * static_cast<double>(with.tv_nsec - without.tv_nsec);
}

}  // namespace psstore
