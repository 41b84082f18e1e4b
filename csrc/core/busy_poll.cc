#include "core/busy_poll.h"

#include <algorithm>

namespace psstore {
namespace {

using Clock = std::chrono::steady_clock;

timespec as_timespec(std::chrono::nanoseconds time) {
  const auto seconds = std::chrono::floor<std::chrono::seconds>(time);
  return {seconds.count(), (time - seconds).count()};
}

}  // namespace

int poll_busily(std::span<pollfd> files, std::chrono::nanoseconds timeout,
                std::chrono::nanoseconds busy) {
  std::chrono::nanoseconds waited{0};
  if (busy > waited) {
    const auto begin = Clock::now();
    do {
      if (const int found = poll(files.data(), files.size(), 0); found != 0) return found;
      waited = Clock::now() - begin;
    } while (waited < std::min(busy, timeout));
  }
  const timespec rest = as_timespec(std::max(timeout - waited, std::chrono::nanoseconds{0}));
  return ppoll(files.data(), files.size(), &rest, nullptr);
}

}  // namespace psstore
