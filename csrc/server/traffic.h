// What a worker does at this shard, as far as can be seen from here: for operators, never for decisions.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace psstore {

// A frame of its is arriving; values are on their way to it; a read of its waits for what others have yet to do.
enum class Activity : size_t { kPush, kPull, kWait };
inline constexpr size_t kNumActivities = 3;

// One worker's, over all of its connections. At each moment it does one thing, or none: of several the first counts,
// as listed above, since who waits for values while its gradients arrive has itself to wait for.
class Traffic {
 public:
  uint64_t pushed_bytes = 0;  // of values, as they travel, also through shared memory
  uint64_t pulled_bytes = 0;

  void begin(Activity activity, double now_s) {
    pass(now_s);
    ++running_[static_cast<size_t>(activity)];
  }
  void end(Activity activity, double now_s) {
    pass(now_s);
    --running_[static_cast<size_t>(activity)];
  }
  // When something began or ended last.
  double at_s() const { return at_s_; }
  // How long it has done each, all together, until now.
  std::array<double, kNumActivities> seconds(double now_s) {
    pass(now_s);
    return seconds_;
  }

 private:
  void pass(double now_s) {
    const auto first = std::ranges::find_if(running_, [](uint32_t count) { return count != 0; });
    if (first != running_.end()) {
      seconds_[static_cast<size_t>(first - running_.begin())] += std::max(0.0, now_s - at_s_);
    }
    at_s_ = std::max(at_s_, now_s);
  }

  std::array<uint32_t, kNumActivities> running_{};  // how many of each
  std::array<double, kNumActivities> seconds_{};
  double at_s_ = 0.0;
};

// One activity from begin() to end(). Whoever is gone before it ends has done so until the worker's latest event.
class Lap {
 public:
  Lap() = default;
  Lap(Lap&& other) noexcept
      : traffic_(std::exchange(other.traffic_, nullptr)), activity_(other.activity_) {}
  Lap& operator=(Lap&& other) noexcept {
    std::swap(traffic_, other.traffic_);
    std::swap(activity_, other.activity_);
    return *this;
  }
  ~Lap() {
    if (runs()) end(traffic_->at_s());
  }

  bool runs() const { return traffic_ != nullptr; }
  // `traffic`: null: of no worker's, which is not measured. REQUIRES: !runs().
  void begin(const std::shared_ptr<Traffic>& traffic, Activity activity, double now_s) {
    if (traffic == nullptr) return;
    traffic_ = traffic;
    activity_ = activity;
    traffic_->begin(activity_, now_s);
  }
  // REQUIRES: runs().
  void end(double now_s) { std::exchange(traffic_, nullptr)->end(activity_, now_s); }

 private:
  std::shared_ptr<Traffic> traffic_;
  Activity activity_ = Activity::kPush;
};

}  // namespace psstore
