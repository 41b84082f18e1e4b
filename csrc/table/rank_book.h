// What a shard knows of each rank: its latest life, and the last round of it that was decided.
//
// It settles in one look-up whether a push is still of use. Thread-safe; its lock is a leaf: nothing
// else is locked while it is held.
#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "core/mutex.h"
#include "table/decision.h"

namespace psstore {

enum class Standing : uint8_t {
  kOpen,      // the round may still be decided
  kPromised,  // its decision was made early: slots may wait for the contribution
  kMeasured,  // what is there of it was measured: that stays as it is
  kDecided,   // its decision was applied: the contribution was counted, or came too late to count
  kStale,     // a later life of the rank is known
};

class RankBook {
 public:
  // Where a push of that origin stands. A life not seen before becomes the rank's latest.
  Standing meet(const Origin& origin);

  // Notes that what was pushed with that origin is measured, and may not change any more.
  void seal(const Origin& origin);

  // Notes that the rounds of these members are decided.
  void record(const Decision& decision);

  // Notes that a decision names this contribution, and that it was not here.
  void note_missing(const Origin& origin);
  // The last such contribution of each rank's latest life, if there is any.
  std::vector<Origin> missing() const;

  // A rank's latest life.
  struct Life {
    uint32_t incarnation = 0;
    std::optional<uint64_t> decided_round = {};
    bool promised = false;  // that round, by an early decision
    std::optional<uint64_t> missing_round = {};
    std::optional<uint64_t> sealed_round = {};
  };
  // All that it knows, by rank,
  std::unordered_map<uint32_t, Life> lives() const;
  // and that of another one, in its place.
  void load(std::unordered_map<uint32_t, Life> lives);

 private:
  // The entry of the origin's rank, moved on to that life if it is a later one.
  Life& latest(const Origin& origin) REQUIRES(mutex_);

  mutable Mutex mutex_;
  std::unordered_map<uint32_t, Life> lives_ GUARDED_BY(mutex_);  // by rank
};

}  // namespace psstore
