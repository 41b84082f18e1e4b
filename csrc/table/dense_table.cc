#include "table/dense_table.h"

#include <string>
#include <utility>

namespace psstore {

// ---- schema ---------------------------------------------------------------------------------------

void DenseTable::define(const TensorDefinition& definition) {
  if (dropped_.count(definition.tensor_id) != 0) return;
  const auto known = definitions_.find(definition.tensor_id);
  if (known != definitions_.end()) {
    if (known->second == definition) return;
    throw Error(ErrorCode::INTERNAL, "tensor " + std::to_string(definition.tensor_id) +
                                         " is defined here already, and differently");
  }
  std::vector<Slot> slots;  // made first: if memory runs out, nothing has changed
  slots.reserve(definition.slices.size());
  for (const SliceSpec& slice : definition.slices) {
    slots.emplace_back(definition.slot(slice), version());
    if (definition.zeros) slots.back().initialise_with_zeros(*pool_);
  }
  definitions_.emplace(definition.tensor_id, definition);
  for (Slot& slot : slots) insert(std::move(slot));
}

void DenseTable::insert(Slot slot) {
  const Key key = slot.spec().key;
  if (applies_by_decision(slot.spec().rule)) decided_keys_.push_back(key);
  Stripe& stripe = stripe_of(key);
  const MutexLock lock(stripe.mutex);
  stripe.slots.emplace(key, std::move(slot));
}

void DenseTable::drop(uint64_t tensor_id) {
  dropped_.insert(tensor_id);
  const auto known = definitions_.find(tensor_id);
  if (known == definitions_.end()) return;
  settle(-1);
  for (const SliceSpec& slice : known->second.slices) {
    Stripe& stripe = stripe_of(slice.key);
    const MutexLock lock(stripe.mutex);
    stripe.slots.erase(slice.key);
  }
  std::erase_if(decided_keys_, [=](Key key) { return tensor_of(key) == tensor_id; });
  definitions_.erase(known);
}

void DenseTable::set_version(uint64_t version) {
  if (!definitions_.empty()) {
    throw Error(ErrorCode::BAD_ARGUMENT, "the version can be set only before the first tensor");
  }
  pending_.reset();
  version_.store(version, std::memory_order_release);
}

// ---- decisions ------------------------------------------------------------------------------------

bool DenseTable::advance(const Decision& decision) {
  if (decision.number() <= version()) return false;
  if (decision.number() != version() + 1) {
    throw Error(ErrorCode::DECISION_GAP,
                "decision " + std::to_string(decision.number()) + " came, but this shard is at " +
                    std::to_string(version()) + "; send the ones in between first");
  }
  settle(-1);
  pending_.emplace(check(decision));
  num_unsettled_.store(decided_keys_.size(), std::memory_order_relaxed);
  version_.store(decision.number(), std::memory_order_release);
  return true;
}

PendingDecision DenseTable::check(const Decision& decision) {
  PendingDecision pending(decision);
  if (decision.skip()) return pending;
  for (const Key key : decided_keys_) {
    Stripe& stripe = stripe_of(key);
    const MutexLock lock(stripe.mutex);
    const Slot& slot = *stripe.find(key);
    if (slot.check(decision)) pending.require_hyper(slot.spec());
  }
  return pending;
}

bool DenseTable::settle(int64_t max_slots) {
  const auto all_settled = [this] { return num_unsettled_.load(std::memory_order_relaxed) == 0; };
  const size_t num_keys = decided_keys_.size();
  for (size_t visited = 0; visited < num_keys && max_slots != 0 && !all_settled(); ++visited) {
    const Key key =
        decided_keys_[next_to_settle_.fetch_add(1, std::memory_order_relaxed) % num_keys];
    Stripe& stripe = stripe_of(key);
    const MutexLock lock(stripe.mutex);
    Slot& slot = *stripe.find(key);
    if (slot.settled(version())) continue;
    bring_up_to_date(stripe, slot);
    --max_slots;
  }
  return all_settled();
}

void DenseTable::bring_up_to_date(Stripe&, Slot& slot) {
  if (!applies_by_decision(slot.spec().rule) || slot.settled(version())) return;
  counters_.count(slot.settle(*pending_, *pool_));
  num_unsettled_.fetch_sub(1, std::memory_order_relaxed);
}

// ---- sums -----------------------------------------------------------------------------------------

TableSize DenseTable::size() {
  TableSize size;
  for (Stripe& stripe : stripes_) {
    const MutexLock lock(stripe.mutex);
    size.num_slots += stripe.slots.size();
    for (const auto& [key, slot] : stripe.slots) {
      if (slot.initialised()) size.value_bytes += slot.spec().num_bytes();
      size.state_bytes += slot.state_bytes();
      size.staged_bytes += slot.staging().num_bytes();
    }
  }
  return size;
}

}  // namespace psstore
