#include "table/rank_book.h"

#include <utility>

namespace psstore {

RankBook::Life& RankBook::latest(const Origin& origin) {
  Life& life = lives_.try_emplace(origin.rank, Life{origin.incarnation}).first->second;
  if (origin.incarnation > life.incarnation) life = Life{origin.incarnation};
  return life;
}

Standing RankBook::meet(const Origin& origin) {
  const MutexLock lock(mutex_);
  const Life& life = latest(origin);
  if (origin.incarnation < life.incarnation) return Standing::kStale;
  if (!life.decided_round || origin.round > *life.decided_round) {
    return life.sealed_round == origin.round ? Standing::kMeasured : Standing::kOpen;
  }
  const bool promised = life.promised && origin.round == *life.decided_round;
  return promised ? Standing::kPromised : Standing::kDecided;
}

void RankBook::seal(const Origin& origin) {
  const MutexLock lock(mutex_);
  Life& life = latest(origin);
  if (life.incarnation == origin.incarnation) life.sealed_round = origin.round;
}

void RankBook::record(const Decision& decision) {
  const MutexLock lock(mutex_);
  for (const Member& member : decision.members()) {
    const Origin& origin = member.origin;
    Life& life = latest(origin);
    if (life.incarnation != origin.incarnation) continue;
    if (life.decided_round && *life.decided_round >= origin.round) continue;
    life.decided_round = origin.round;
    life.promised = decision.early();
  }
}

void RankBook::note_missing(const Origin& origin) {
  const MutexLock lock(mutex_);
  Life& life = latest(origin);
  if (life.incarnation == origin.incarnation) life.missing_round = origin.round;
}

std::vector<Origin> RankBook::missing() const {
  const MutexLock lock(mutex_);
  std::vector<Origin> found;
  for (const auto& [rank, life] : lives_) {
    if (life.missing_round) found.push_back({rank, life.incarnation, *life.missing_round});
  }
  return found;
}

std::unordered_map<uint32_t, RankBook::Life> RankBook::lives() const {
  const MutexLock lock(mutex_);
  return lives_;
}

void RankBook::load(std::unordered_map<uint32_t, Life> lives) {
  const MutexLock lock(mutex_);
  lives_ = std::move(lives);
}

}  // namespace psstore
