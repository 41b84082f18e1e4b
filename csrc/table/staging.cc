#include "table/staging.h"

#include <algorithm>
#include <utility>

namespace psstore {
namespace {

bool comes_before(const StagedContribution& staged, uint32_t rank) {
  return staged.origin.rank < rank;
}

}  // namespace

std::vector<StagedContribution>::iterator Staging::position(uint32_t rank) {
  return std::lower_bound(by_rank_.begin(), by_rank_.end(), rank, comes_before);
}

Staged Staging::offer(StagedContribution contribution) {
  const Origin& incoming = contribution.origin;
  const auto place = position(incoming.rank);
  if (place != by_rank_.end() && place->origin.rank == incoming.rank) {
    const Origin& staged = place->origin;
    if (incoming.incarnation < staged.incarnation) return Staged::kStale;
    if (incoming.incarnation == staged.incarnation && incoming.round < staged.round) {
      return Staged::kLate;
    }
  }
  put(std::move(contribution));
  return Staged::kTaken;
}

void Staging::put(StagedContribution contribution) {
  const auto place = position(contribution.origin.rank);
  if (place != by_rank_.end() && place->origin.rank == contribution.origin.rank) {
    *place = std::move(contribution);
  } else {
    by_rank_.insert(place, std::move(contribution));
  }
}

const StagedContribution* Staging::find(const Origin& origin) const {
  const auto place = std::lower_bound(by_rank_.begin(), by_rank_.end(), origin.rank, comes_before);
  return place != by_rank_.end() && place->origin == origin ? &*place : nullptr;
}

void Staging::release(std::span<const Member> members) {
  for (const Member& member : members) {
    const Origin& decided = member.origin;
    const auto place = position(decided.rank);
    if (place == by_rank_.end() || place->origin.rank != decided.rank) continue;
    const Origin& staged = place->origin;
    if (staged.incarnation < decided.incarnation ||
        (staged.incarnation == decided.incarnation && staged.round <= decided.round)) {
      by_rank_.erase(place);
    }
  }
}

size_t Staging::num_bytes() const {
  size_t total = 0;
  for (const StagedContribution& staged : by_rank_) total += staged.slice.num_bytes;
  return total;
}

}  // namespace psstore
