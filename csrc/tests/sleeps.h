// How often the calling thread has gone to sleep: what waits without sleeping does not count.
#pragma once

#include <sys/resource.h>

namespace psstore::testing {

inline long num_sleeps() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_nvcsw;
}

}  // namespace psstore::testing
