#include "rows/eviction.h"

#include <algorithm>

namespace psstore {
namespace {

// Usage: the decision that changed the row last, modulo 2^32.
class LeastRecent : public Eviction {
 public:
  uint32_t used(uint32_t, uint64_t decision) const override {
    return static_cast<uint32_t>(decision);
  }
  uint64_t worth(uint32_t usage, uint64_t decision) const override {
    return UINT32_MAX - age(usage, decision);
  }

 protected:
  static uint32_t age(uint32_t usage, uint64_t decision) {
    return static_cast<uint32_t>(decision) - usage;
  }
};

// Rows go a sixteenth of their time late, together: to look for them costs a look at each row.
class TimeToLive : public LeastRecent {
 public:
  explicit TimeToLive(uint32_t decisions) : decisions_(decisions) {}

  uint64_t due(uint32_t usage, uint64_t decision) const override {
    const uint64_t most = decisions_ + grace();
    return decision + most - std::min<uint64_t>(most, age(usage, decision));
  }
  uint64_t grace() const override { return decisions_ / 16; }

 private:
  const uint64_t decisions_;
};

// Usage: | changes: 8 bits | halvings: 24 bits |, of which the second says when the first was right: all changes are halved
// every kHalvedEvery decisions. Between rows with as many changes the one that was changed longer ago goes first.
class LeastFrequent : public Eviction {
 public:
  uint32_t used(uint32_t before, uint64_t decision) const override {
    const uint32_t changes = std::min(changes_by(before, decision) + 1, kMostChanges);
    return changes << kHalvingBits | halvings_at(decision);
  }
  uint64_t worth(uint32_t usage, uint64_t decision) const override {
    return uint64_t{changes_by(usage, decision)} << kHalvingBits |
           (kHalvings - halvings_since(usage, decision));
  }

 private:
  static constexpr uint64_t kHalvedEvery = 1024;
  static constexpr uint32_t kMostChanges = 255;
  static constexpr int kHalvingBits = 24;
  static constexpr uint32_t kHalvings = (uint32_t{1} << kHalvingBits) - 1;

  static uint32_t halvings_at(uint64_t decision) {
    return static_cast<uint32_t>(decision / kHalvedEvery) & kHalvings;
  }
  static uint32_t halvings_since(uint32_t usage, uint64_t decision) {
    return (halvings_at(decision) - usage) & kHalvings;
  }
  static uint32_t changes_by(uint32_t usage, uint64_t decision) {
    return usage >> kHalvingBits >> std::min<uint32_t>(halvings_since(usage, decision), 8);
  }
};

}  // namespace

std::unique_ptr<const Eviction> Eviction::make(const RowBounds& bounds) {
  switch (bounds.eviction) {
    case EvictionKind::kNone: break;
    case EvictionKind::kLeastRecent: return std::make_unique<LeastRecent>();
    case EvictionKind::kLeastFrequent: return std::make_unique<LeastFrequent>();
    case EvictionKind::kTimeToLive: return std::make_unique<TimeToLive>(bounds.time_to_live);
  }
  return nullptr;
}

}  // namespace psstore
