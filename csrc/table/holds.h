// Which decisions are held for readers: what a slot keeps of itself before it takes a step.
//
//   hold(id)          from the decision that the table is at, on, whatever comes
//   settle(id, n)     of decision n alone, once the reader knows which one all shards have
//   release(id)
//
// A reader asks every shard for a hold, and then settles on the latest version that one of them was at: whichever
// shard is behind passes that decision later, and keeps it. So no shard has to hear of a hold before a decision is
// made, nobody who trains waits for a reader, and what is kept is what changed between the two questions.
//
// Guarded by the table's decision mutex: exclusive to change which holds there are, shared to ask; give_up() alone
// needs neither.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>

namespace psstore {

class Holds {
 public:
  struct Kept {
    bool any = false;
    bool state = false;  // rule state, too
  };

  bool none() const { return holds_.empty(); }
  size_t size() const { return holds_.size(); }

  void hold(uint64_t id, uint64_t from, bool state) {
    holds_.insert_or_assign(id, std::make_shared<Hold>(from, kOpen, state));
  }
  // False: it does not hold that decision, or no longer.
  bool settle(uint64_t id, uint64_t at) {
    const auto found = holds_.find(id);
    if (found == holds_.end() || !found->second->covers(at, at)) return false;
    found->second->from = found->second->to = at;
    return true;
  }
  // It holds that decision, and no other one.
  bool is_settled(uint64_t id, uint64_t at) const {
    const auto found = holds_.find(id);
    return found != holds_.end() && found->second->from == at && found->second->to == at &&
           !found->second->gone;
  }
  bool release(uint64_t id) { return holds_.erase(id) > 0; }
  // What takes memory that others need is not kept any longer, for nobody.
  void give_up() {
    for (const auto& [_, hold] : holds_) hold->gone = true;
  }

  // What is to be kept of something that has been as it is from decision `from` to decision `to`.
  Kept wanted(uint64_t from, uint64_t to) const {
    Kept kept;
    for (const auto& [_, hold] : holds_) {
      if (!hold->covers(from, to)) continue;
      kept.any = true;
      kept.state |= hold->state;
    }
    return kept;
  }

 private:
  static constexpr uint64_t kOpen = UINT64_MAX;

  struct Hold {
    Hold(uint64_t first, uint64_t last, bool with_state)
        : from(first), to(last), state(with_state) {}
    // It holds some decision of [first, last].
    bool covers(uint64_t first, uint64_t last) const {
      return !gone && from <= last && first <= to;
    }

    uint64_t from;
    uint64_t to;
    const bool state;
    std::atomic<bool> gone = false;
  };

  std::map<uint64_t, std::shared_ptr<Hold>> holds_;
};

}  // namespace psstore
