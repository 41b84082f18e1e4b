#include "table/dense_table.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "core/breakable_rules.h"

namespace psstore {
namespace {

// So many slots ahead the fields of a slot are fetched from memory, which takes longer than one small slot.
constexpr size_t kSlotsAhead = 4;

uint64_t num_states(RuleKind rule, const Hyper& hyper) {
  const StateLayout layout = state_layout(rule, hyper);
  const auto unused = std::count(layout.names.begin(), layout.names.end(), nullptr);
  return static_cast<uint64_t>(kMaxStates - unused);
}

}  // namespace

// ---- schema ---------------------------------------------------------------------------------------

void DenseTable::define(const TensorDefinition& definition) {
  if (dropped_.contains(definition.tensor_id)) return;
  const auto known = definitions_.find(definition.tensor_id);
  if (known != definitions_.end()) {
    if (known->second == definition) return;
    throw Error(ErrorCode::INTERNAL, "tensor " + std::to_string(definition.tensor_id) +
                                         " is defined here already, and differently");
  }
  std::vector<Slot> slots = make_slots(definition);
  const uint64_t num_states = reserved_states({definition.group, definition.rule});
  uint64_t num_bytes = 0;
  for (const Slot& slot : slots) num_bytes += slot.bytes_to_reserve(num_states, *backend_);
  backend_->reserve(num_bytes);  // if there is no room, nothing has changed
  for (Slot& slot : slots) slot.reserved(slot.bytes_to_reserve(num_states, *backend_));
  try {
    // Where what is reserved does not keep pushes out, zeros take their memory before those can.
    for (Slot& slot : slots) {
      if (!backend_->counts_use()) slot.make_zeros(*backend_);
    }
  } catch (...) {
    backend_->unreserve(num_bytes);
    throw;
  }
  definitions_.emplace(definition.tensor_id, definition);
  for (Slot& slot : slots) insert(std::move(slot));
}

uint64_t DenseTable::reserved_states(const RuledGroup& of) const {
  const auto asked = asked_states_.find(of);
  return asked != asked_states_.end() ? asked->second : num_states(of.second, Hyper{});
}

void DenseTable::reserve_states(const PendingDecision& pending) {
  uint64_t num_bytes = 0;
  std::vector<std::pair<RuledGroup, uint64_t>> asked;
  for (const auto& [of, hyper] : pending.hypers()) {
    const uint64_t needed = num_states(of.second, hyper);
    if (needed <= reserved_states(of)) continue;
    asked.emplace_back(of, needed);
    for_each_slot(of, [&](Slot& slot) { num_bytes += slot.bytes_to_reserve(needed, *backend_); });
  }
  if (asked.empty()) return;
  backend_->reserve(num_bytes);
  for (const auto& [of, needed] : asked) {
    asked_states_[of] = needed;
    for_each_slot(of, [&, num_states = needed](Slot& slot) {
      slot.reserved(slot.bytes_to_reserve(num_states, *backend_));
    });
  }
}

void DenseTable::for_each_slot(const RuledGroup& of, const std::function<void(Slot&)>& call) {
  for (const auto& [id, definition] : definitions_) {
    if (RuledGroup{definition.group, definition.rule} != of) continue;
    for (const SliceSpec& slice : definition.slices) {
      Stripe& stripe = stripe_of(slice.key);
      const MutexLock lock(stripe.mutex);
      call(*find(stripe, slice.key));
    }
  }
}

std::vector<Slot> DenseTable::make_slots(const TensorDefinition& definition) {
  std::vector<Slot> slots;
  slots.reserve(definition.slices.size());
  for (const SliceSpec& slice : definition.slices) {
    slots.emplace_back(definition.slot(slice), version(), definition.zeros, backend_);
    if (row_decisions_budget_ && slots.back().spec().has_rows()) {
      slots.back().note_row_decisions(row_decisions_budget_);
    }
  }
  return slots;
}

void DenseTable::insert(Slot slot) {
  const Key key = slot.spec().key;
  Stripe& stripe = stripe_of(key);
  const MutexLock lock(stripe.mutex);
  Slot& there = stripe.slots.emplace(key, std::move(slot)).first->second;
  index_.insert(key, &there);
  if (applies_by_decision(there.spec().rule)) decided_.push_back({key, &there});
}

void DenseTable::drop(uint64_t tensor_id) {
  dropped_.insert(tensor_id);
  const auto known = definitions_.find(tensor_id);
  if (known == definitions_.end()) return;
  try {
    settle(-1);
  } catch (const Error& error) {  // whoever needs another step than that tries again
    if (error.code() != ErrorCode::OUT_OF_MEMORY) throw;
  }
  uint64_t num_bytes = 0;
  for (const SliceSpec& slice : known->second.slices) num_bytes += erase(slice.key);
  backend_->unreserve(num_bytes);
  std::erase_if(decided_, [=](const Decided& one) { return tensor_of(one.key) == tensor_id; });
  definitions_.erase(known);
}

// What is unsettled after settle() is held, or there was no memory for its step.
uint64_t DenseTable::erase(Key key) {
  Stripe& stripe = stripe_of(key);
  const MutexLock lock(stripe.mutex);
  Slot& slot = *find(stripe, key);
  const uint64_t reserved_bytes = slot.reserved_bytes();
  forget_kept(slot);
  if (!is_settled(slot)) {
    num_unsettled_.fetch_sub(1, std::memory_order_relaxed);
    if (!slot.ready(*pending_)) num_held_.fetch_sub(1, std::memory_order_relaxed);
  }
  index_.erase(key);
  stripe.slots.erase(key);
  return reserved_bytes;
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
  if (num_unsettled_.load(std::memory_order_relaxed) != 0) require_scale();
  Checked checked = check(decision);
  finish_pending();
  pending_.emplace(std::move(checked.pending));
  num_held_.store(checked.num_held, std::memory_order_relaxed);
  num_unsettled_.store(decided_.size(), std::memory_order_relaxed);
  version_.store(decision.number(), std::memory_order_release);
  return true;
}

void DenseTable::require_scale() const {
  if (!pending_->lacks_scale()) return;
  throw Error(ErrorCode::DECISION_GAP, "decision " + std::to_string(version()) +
                                           " still waits for its scale; send that before the " +
                                           "next decision");
}

// There is memory for the last step before the first one is taken: standbys are not told of a decision that failed.
void DenseTable::finish_pending() {
  if (num_unsettled_.load(std::memory_order_relaxed) == 0) return;
  for (const auto& [key, slot] : decided_) {
    Stripe& stripe = stripe_of(key);
    const MutexLock lock(stripe.mutex);
    if (!is_settled(*slot)) make_room_for_step(*slot);
  }
  const Decision& held = pending_->decision();
  for (const auto& [key, there] : decided_) {
    Stripe& stripe = stripe_of(key);
    const MutexLock lock(stripe.mutex);
    Slot& slot = *there;
    if (is_settled(slot)) continue;
    note_missing(slot, held);
    take_step(slot);
  }
  num_unsettled_.store(0, std::memory_order_relaxed);
  num_held_.store(0, std::memory_order_relaxed);
}

void DenseTable::note_missing(const Slot& slot, const Decision& decision) {
  for (const Member& member : decision.members()) {
    if (!slot.lacks(member)) continue;
    ranks_.note_missing(member.origin);
    counters_.missing.add();
  }
}

DenseTable::Checked DenseTable::check(const Decision& decision) {
  Checked checked{PendingDecision(decision)};
  if (decision.skip()) return checked;
  for (size_t place = 0; place < decided_.size(); ++place) {
    const auto& [key, there] = decided_[place];
    fetch_lines(decided_[(place + kSlotsAhead) % decided_.size()].slot, sizeof(Slot));
    Stripe& stripe = stripe_of(key);
    const MutexLock lock(stripe.mutex);
    Slot& slot = *there;
    if (!decision.early()) note_missing(slot, decision);
    if (slot.counted(decision)) {
      checked.pending.require_hyper(slot.spec());
      const Decision* held = is_settled(slot) ? nullptr : &pending_->decision();
      if (slot.spec().has_rows()) slot.reserve_rows(decision, held);
    }
    if (!slot.ready(checked.pending)) ++checked.num_held;
  }
  reserve_states(checked.pending);
  return checked;
}

bool DenseTable::set_scale(uint64_t number, std::optional<double> factor) {
  if (number != version() || !pending_ || !pending_->lacks_scale()) return false;
  pending_->set_scale(factor);
  num_held_.store(0, std::memory_order_relaxed);
  return true;
}

bool DenseTable::settle(int64_t max_slots, int64_t max_bytes) {
  const auto all_settled = [this] {
    return num_unsettled_.load(std::memory_order_relaxed) <=
           num_held_.load(std::memory_order_relaxed);
  };
  const size_t num_slots = decided_.size();
  uint64_t num_bytes = 0;
  const auto has_more = [&] {
    return max_slots != 0 && num_bytes < static_cast<uint64_t>(max_bytes);
  };
  for (size_t visited = 0; visited < num_slots && has_more() && !all_settled(); ++visited) {
    const size_t place = next_to_settle_.fetch_add(1, std::memory_order_relaxed);
    fetch_after(place);
    const auto& [key, there] = decided_[place % num_slots];
    Stripe& stripe = stripe_of(key);
    const MutexLock lock(stripe.mutex);
    Slot& slot = *there;
    if (is_settled(slot)) continue;
    const uint64_t step_bytes = slot.step_bytes(*pending_);
    if (!bring_up_to_date(stripe, slot)) continue;
    num_bytes += step_bytes;
    --max_slots;
  }
  return all_settled();
}

void DenseTable::fetch_after(size_t place) {
  fetch_lines(decided_[(place + kSlotsAhead) % decided_.size()].slot, sizeof(Slot));
  const auto& [key, slot] = decided_[(place + 1) % decided_.size()];
  Stripe& stripe = stripe_of(key);
  const MutexLock lock(stripe.mutex);
  slot->fetch();
}

bool DenseTable::bring_up_to_date(Stripe&, Slot& slot) {
  if (is_settled(slot)) return true;
  if (!slot.ready(*pending_)) return false;
  take_step(slot);
  num_unsettled_.fetch_sub(1, std::memory_order_relaxed);
  return true;
}

const Origin* DenseTable::held_with(Stripe&, const Slot& slot, uint32_t rank) {
  if (is_settled(slot)) return nullptr;
  const Member* member = pending_->decision().member(rank);
  return member != nullptr && member->has(tensor_of(slot.spec().key)) ? &member->origin : nullptr;
}

void DenseTable::contributed(Stripe& stripe, Slot& slot) {
  if (!slot.ready(*pending_)) return;
  num_held_.fetch_sub(1, std::memory_order_relaxed);
  try {
    bring_up_to_date(stripe, slot);
  } catch (const Error& error) {  // what is staged stays so; whoever needs the step tries again
    if (error.code() != ErrorCode::OUT_OF_MEMORY) throw;
  }
}

std::optional<Sum> DenseTable::squares(Stripe&, Slot& slot) {
  if (!applies_by_decision(slot.spec().rule) || !pending_) return std::nullopt;
  return slot.squares(pending_->decision(), *backend_);
}

std::optional<std::vector<Sum>> DenseTable::staged_squares(const Decision& alone) {
  std::vector<std::pair<Key, Sum>> by_key;
  for (const auto& [key, slot] : decided_) {
    if (!alone.members()[0].has(tensor_of(key))) continue;
    Stripe& stripe = stripe_of(key);
    const MutexLock lock(stripe.mutex);
    bring_up_to_date(stripe, *slot);
    if (slot->lacks(alone.members()[0])) return std::nullopt;
    by_key.emplace_back(key, slot->staged_squares(alone, *backend_));
  }
  std::ranges::sort(by_key, {}, &std::pair<Key, Sum>::first);
  std::vector<Sum> sums;
  sums.reserve(by_key.size());
  for (auto& [key, sum] : by_key) sums.push_back(std::move(sum));
  return sums;
}

// ---- reading as of a decision -----------------------------------------------------------------------

uint64_t DenseTable::hold(uint64_t id, bool state) {
  holds_.hold(id, version(), state);
  return version();
}

bool DenseTable::settle_hold(uint64_t id, uint64_t at) {
  const bool holds = holds_.settle(id, at);
  let_go();
  return holds;
}

void DenseTable::release_hold(uint64_t id) {
  if (holds_.release(id)) let_go();
}

void DenseTable::give_up_holds() {
  holds_.give_up();
  let_go();
}

void DenseTable::let_go() {
  if (kept_bytes_.load(std::memory_order_relaxed) == 0) return;
  const Holds held = holds_;
  const auto is_wanted = [&held](uint64_t from, uint64_t to) { return held.wanted(from, to).any; };
  uint64_t num_bytes = 0;
  for (const auto& [key, there] : decided_) {
    Stripe& stripe = stripe_of(key);
    const MutexLock lock(stripe.mutex);
    num_bytes += there->let_go(is_wanted);
  }
  kept_bytes_.fetch_sub(num_bytes, std::memory_order_relaxed);
}

void DenseTable::keep_for_readers(Slot& slot) {
  if (holds_.none() || !slot.initialised() || !slot.will_change(*pending_)) return;
  const uint64_t to = pending_->decision().number() - 1;
  const Holds::Kept kept = holds_.wanted(slot.unchanged_since(), to);
  if (!kept.any || !holds(BreakableRule::kWHAT_IS_HELD_IS_KEPT)) return;
  slot.make_zeros(*backend_);
  const uint64_t num_bytes = slot.keep(to, kept.state);
  if (kept_bytes_.fetch_add(num_bytes, std::memory_order_relaxed) + num_bytes > max_kept_bytes_) {
    holds_.give_up();
    forget_kept(slot);
  }
}

void DenseTable::restoring(const Slot& slot) {
  if (!holds_.none() && holds_.wanted(slot.unchanged_since(), slot.settled_to()).any)
    holds_.give_up();
}

void DenseTable::forget_kept(Slot& slot) {
  const uint64_t num_bytes = slot.let_go([](uint64_t, uint64_t) { return false; });
  kept_bytes_.fetch_sub(num_bytes, std::memory_order_relaxed);
}

void DenseTable::take_step(Slot& slot) {
  try {
    keep_for_readers(slot);
    counters_.count(slot.settle(*pending_, *backend_));
  } catch (const Error& error) {
    if (!gives_up_kept(slot, error)) throw;
    counters_.count(slot.settle(*pending_, *backend_));
  }
}

void DenseTable::make_room_for_step(Slot& slot) {
  try {
    keep_for_readers(slot);
    slot.make_room_for_step(*pending_, *backend_);
  } catch (const Error& error) {
    if (!gives_up_kept(slot, error)) throw;
    slot.make_room_for_step(*pending_, *backend_);
  }
}

// Nobody who trains goes without memory because of a reader.
bool DenseTable::gives_up_kept(Slot& slot, const Error& error) {
  if (error.code() != ErrorCode::OUT_OF_MEMORY || !slot.keeps_any()) return false;
  holds_.give_up();
  forget_kept(slot);
  slot.forget_changes();
  return true;
}

std::optional<Part> DenseTable::part_at(Stripe& stripe, Slot& slot, uint16_t index, uint64_t at,
                                        bool& waits) {
  if (slot.settled_to() < at && !bring_up_to_date(stripe, slot)) {
    waits = true;
    return slot.part(index);
  }
  if (slot.settled_to() >= at && slot.unchanged_since() <= at) {
    slot.make_zeros(*backend_);
    return slot.part(index);
  }
  return slot.kept_part(index, at);
}

std::optional<RowSnapshot> DenseTable::rows_at(Stripe& stripe, Slot& slot, uint64_t at,
                                               bool& waits) {
  waits = slot.settled_to() < at && !bring_up_to_date(stripe, slot);
  return waits ? std::nullopt : slot.rows_at(at);
}

// ---- being written elsewhere, and read back ---------------------------------------------------------

std::optional<TableImage> DenseTable::image(uint64_t reader, uint64_t at) {
  const auto gone = [at] {
    return Error(ErrorCode::VERSION_GONE,
                 "version " + std::to_string(at) +
                     " is not kept any longer: the memory for snapshots is less than what changed "
                     "meanwhile, or a tensor was restored");
  };
  if (!settle_hold(reader, at)) throw gone();
  TableImage image;
  image.reader = reader;
  image.at = at;
  for (Stripe& stripe : stripes_) {
    const MutexLock lock(stripe.mutex);
    for (const auto& [key, slot] : stripe.slots) {
      if (!applies_by_decision(slot.spec().rule)) {
        image.undecided.emplace(key, slot.value());
      } else if (slot.settled_to() < at) {
        return std::nullopt;
      }
      const std::optional<SlotImage> found = slot.image(at);
      if (!found) throw gone();
      image.slots.push_back(*found);
    }
  }
  return image;
}

uint64_t DenseTable::part_bytes(size_t part, const SlotImage& image) {
  Stripe& stripe = stripe_of(image.key);
  const MutexLock lock(stripe.mutex);
  const Slot* slot = find(stripe, image.key);
  return slot != nullptr ? slot->part_bytes(part, image) : 0;
}

void DenseTable::load(const SlotImage& image, std::span<const BufferRef> parts) {
  Stripe& stripe = stripe_of(image.key);
  const MutexLock lock(stripe.mutex);
  Slot* slot = find(stripe, image.key);
  const bool is_new = slot != nullptr && slot->version() == 0;
  const bool goes_on =
      slot != nullptr && slot->spec().has_rows() && slot->version() == image.version;
  if ((!is_new && !goes_on) || parts.size() > 1 + kMaxStates) {
    throw Error(ErrorCode::BAD_ARGUMENT,
                "slice " + std::to_string(image.key) + " is not there, or not new");
  }
  const SlotSpec& spec = slot->spec();
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!parts[i]) continue;
    if (parts[i]->size() < slot->part_bytes(i, image)) {
      throw Error(ErrorCode::BAD_ARGUMENT,
                  "what is to be loaded into slice " + std::to_string(image.key) + " is too short");
    }
    const bool is_state = i > 0 && !spec.has_rows();
    if (is_state && !largest_state_layout(spec.rule).uses(static_cast<int>(i) - 1)) {
      throw Error(ErrorCode::BAD_ARGUMENT, "slice " + std::to_string(image.key) +
                                               " is to be loaded with state that its rule has not");
    }
  }
  slot->load(image, parts, *backend_);
}

// ---- being kept in another process, too -------------------------------------------------------------

std::optional<std::vector<SlotCopy>> DenseTable::copies() {
  if (!is_settled()) return std::nullopt;
  std::vector<SlotCopy> copies;
  for (Stripe& stripe : stripes_) {
    const MutexLock lock(stripe.mutex);
    for (const auto& [_, slot] : stripe.slots) slot.copy_to(copies, version(), *backend_);
  }
  return copies;
}

void DenseTable::own_staged() try {
  for (Stripe& stripe : stripes_) {
    const MutexLock lock(stripe.mutex);
    for (auto& [_, slot] : stripe.slots) {
      for (StagedContribution one : std::vector(slot.staging().all())) {
        PayloadSlice& slice = one.slice;
        if (!slice.payload || backend_->owns(slice.payload)) continue;
        const BufferRef copy = backend_->allocate_payload(slice.num_bytes);
        std::memcpy(copy->data(), slice.data(), slice.num_bytes);
        slice.payload = copy;
        slice.offset = 0;
        slot.staging().put(std::move(one));
      }
    }
  }
} catch (const Error&) {
  // There is no memory: the others stay where they lie.
}

bool DenseTable::is_settled() {
  settle(-1);
  return num_unsettled_.load(std::memory_order_relaxed) == 0;
}

void DenseTable::load(const SlotImage& image, std::span<const BufferRef> parts,
                      std::optional<double> squares) {
  load(image, parts);
  if (!squares) return;
  Stripe& stripe = stripe_of(image.key);
  const MutexLock lock(stripe.mutex);
  find(stripe, image.key)->load_squares(version(), *squares);
}

void DenseTable::note_base(const Life& life, Key key) {
  Stripe& stripe = stripe_of(key);
  const MutexLock lock(stripe.mutex);
  Slot* slot = find(stripe, key);
  if (slot == nullptr) return;
  bring_up_to_date(stripe, *slot);
  slot->make_zeros(*backend_);
  slot->note_base(life, *backend_);
}

void DenseTable::load_base(const Life& life, Key key, BufferRef base) {
  Stripe& stripe = stripe_of(key);
  const MutexLock lock(stripe.mutex);
  Slot* slot = find(stripe, key);
  const bool fits =
      slot != nullptr && slot->has_bases() && (!base || base->size() >= slot->spec().num_bytes());
  if (!fits) {
    throw Error(ErrorCode::BAD_ARGUMENT,
                "slice " + std::to_string(key) + " is not there, or has no such base");
  }
  if (base) {
    slot->load_base(life, std::move(base), *backend_);
  } else {
    slot->note_base(life, *backend_);
  }
}

void DenseTable::resume(const Decision& last) {
  pending_.emplace(last);
  if (pending_->lacks_scale()) pending_->set_scale(1.0);
}

// ---- sums -----------------------------------------------------------------------------------------

void DenseTable::forget_changes() {
  for (Stripe& stripe : stripes_) {
    const MutexLock lock(stripe.mutex);
    for (auto& [key, slot] : stripe.slots) slot.forget_changes();
  }
}

TableSize DenseTable::size() {
  TableSize size;
  size.num_held = num_held_.load(std::memory_order_relaxed);
  size.num_holds = holds_.size();
  size.kept_bytes = kept_bytes_.load(std::memory_order_relaxed);
  for (Stripe& stripe : stripes_) {
    const MutexLock lock(stripe.mutex);
    size.num_slots += stripe.slots.size();
    for (const auto& [key, slot] : stripe.slots) {
      if (slot.initialised()) size.value_bytes += slot.spec().num_bytes();
      size.state_bytes += slot.state_bytes();
      size.staged_bytes += slot.staging().num_bytes();
      size.published_bytes += slot.published_bytes();
      size.base_bytes += slot.base_bytes();
    }
  }
  return size;
}

std::map<uint64_t, RowCounts> DenseTable::row_counts() {
  std::map<uint64_t, RowCounts> counts;
  for (Stripe& stripe : stripes_) {
    const MutexLock lock(stripe.mutex);
    for (const auto& [key, slot] : stripe.slots) {
      if (slot.spec().has_rows()) counts[tensor_of(key)] += slot.row_counts();
    }
  }
  return counts;
}

}  // namespace psstore
