#include "table/staging.h"

#include <algorithm>
#include <utility>

namespace psstore {
namespace {

// Whether the decision used what is staged, or left it behind.
bool is_over(const Origin& staged, const Origin& decided) {
  if (staged.incarnation != decided.incarnation) return staged.incarnation < decided.incarnation;
  return staged.round <= decided.round;
}

}  // namespace

// Where everybody has staged, a rank is its own place.
size_t Staging::position(uint32_t rank) const {
  if (rank < by_rank_.size() && by_rank_[rank].origin.rank == rank) return rank;
  const auto place = std::lower_bound(by_rank_.begin(), by_rank_.end(), rank,
                                      [](const StagedContribution& staged, uint32_t wanted) {
                                        return staged.origin.rank < wanted;
                                      });
  return static_cast<size_t>(place - by_rank_.begin());
}

Staged Staging::offer(StagedContribution contribution) {
  const Origin& incoming = contribution.origin;
  const size_t place = position(incoming.rank);
  if (place < by_rank_.size() && by_rank_[place].origin.rank == incoming.rank) {
    const Origin& staged = by_rank_[place].origin;
    if (incoming.incarnation < staged.incarnation) return Staged::kStale;
    if (incoming.incarnation == staged.incarnation && incoming.round < staged.round) {
      return Staged::kLate;
    }
  }
  put(std::move(contribution));
  return Staged::kTaken;
}

void Staging::put(StagedContribution contribution) {
  const size_t place = position(contribution.origin.rank);
  if (place < by_rank_.size() && by_rank_[place].origin.rank == contribution.origin.rank) {
    by_rank_[place] = std::move(contribution);
  } else {
    by_rank_.insert(by_rank_.begin() + static_cast<std::ptrdiff_t>(place), std::move(contribution));
  }
}

const StagedContribution* Staging::find(const Origin& origin) const {
  const size_t place = position(origin.rank);
  return place < by_rank_.size() && by_rank_[place].origin == origin ? &by_rank_[place] : nullptr;
}

void Staging::release(const Decision& decision) {
  std::erase_if(by_rank_, [&](const StagedContribution& staged) {
    const Member* member = decision.member(staged.origin.rank);
    return member != nullptr && is_over(staged.origin, member->origin);
  });
}

size_t Staging::num_bytes() const {
  size_t total = 0;
  for (const StagedContribution& staged : by_rank_) total += staged.slice.num_bytes;
  return total;
}

}  // namespace psstore
