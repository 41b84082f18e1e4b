// All dense slices of a shard: which there are, and the decision that they are at.
//
// Applying a decision has two parts. advance() is short: it checks that every slot can take the step, and
// notes the decision. The arithmetic comes slot by slot, when a slot is touched next (bring_up_to_date)
// or when there is time (settle). At most one decision is pending: the next advance() first finishes it.
// From outside, the step happens at once: whoever looks at a slot sees it done.
//
// A decision may leave something open (table/decision.h). The slots that it concerns are held then, and
// whoever looks is told so: until the last contribution has come, each slot on its own, or until
// set_scale(), all of them. There is no next decision while one is held.
//
// Locks, in the order in which they are taken:
//   decision_mutex   shared by whoever touches slots; exclusive for define, drop, advance, set_version
//   Stripe::mutex    the slots behind it; one at a time
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "core/id_ranges.h"
#include "core/mutex.h"
#include "table/counters.h"
#include "table/holds.h"
#include "table/rank_book.h"
#include "table/stripe.h"

namespace psstore {

// Sums over the slots there are now.
struct TableSize {
  uint64_t num_slots = 0;
  uint64_t num_held = 0;
  uint64_t value_bytes = 0;
  uint64_t state_bytes = 0;
  uint64_t staged_bytes = 0;
  uint64_t published_bytes = 0;
  uint64_t base_bytes = 0;
  uint64_t num_holds = 0;
  uint64_t kept_bytes = 0;  // for those who read as of a decision
};

struct TableImage {
  uint64_t reader = 0;  // who holds it
  uint64_t at = 0;
  std::vector<SlotImage> slots;
  std::unordered_map<Key, BufferRef> undecided;           // values that no decision changes
  std::unordered_map<Key, std::vector<uint32_t>> chosen;  // of partitions, places of rows
};

class DenseTable {
 public:
  DenseTable(size_t num_stripes, std::shared_ptr<Backend> backend, Counters& counters,
             RankBook& ranks, uint64_t max_kept_bytes,
             std::shared_ptr<MemoryBudget> row_decisions_budget)
      : backend_(std::move(backend)),
        counters_(counters),
        ranks_(ranks),
        max_kept_bytes_(max_kept_bytes),
        row_decisions_budget_(std::move(row_decisions_budget)),
        stripes_(num_stripes) {}

  SharedMutex decision_mutex;

  // Creates the slots of a tensor. The same definition again changes nothing, nor does one of a tensor
  // that was dropped (ids are never reused: it is a late copy). Another definition for the same id
  // throws Error(INTERNAL), one that the backend has no room for Error(OUT_OF_MEMORY). `definition` has been
  // checked.
  void define(const TensorDefinition& definition) REQUIRES(decision_mutex);
  // Forgets the slots; values that readers hold stay theirs. May come before the definition.
  void drop(uint64_t tensor_id) REQUIRES(decision_mutex);

  // Number of the last decision applied, be it pending.
  uint64_t version() const { return version_.load(std::memory_order_acquire); }
  // Throws Error(BAD_ARGUMENT) if there are slots.
  void set_version(uint64_t version) REQUIRES(decision_mutex);

  // Makes `decision` the pending one. False: it was applied before. What it names and nobody has staged counts as
  // absent, as does what an early one before it still waits for: the rank book is told.
  // Throws, with only those steps taken of the decision before it that lack nothing: DECISION_GAP, also if that lacks its
  // scale; BAD_HYPER; OUT_OF_MEMORY if it asks for rule state that the backend has no room for. What that one still waits
  // for counts then as before: standbys are not told of a decision that failed.
  bool advance(const Decision& decision) REQUIRES(decision_mutex);
  // What the pending decision lacks (PendingDecision::set_scale). False, with nothing changed: it is not
  // that one, or lacks none.
  bool set_scale(uint64_t number, std::optional<double> factor) REQUIRES(decision_mutex);
  // Carries the pending decision out on up to `max_slots` more slots (negative: all), until it has changed `max_bytes` of
  // values (negative: any number). True: on all that are not held.
  bool settle(int64_t max_slots, int64_t max_bytes = -1) REQUIRES_SHARED(decision_mutex);

  Stripe& stripe_of(Key key) REQUIRES_SHARED(decision_mutex) { return stripes_.of(key); }
  // nullptr if there is none. REQUIRES: `stripe` is that of the key.
  Slot* find([[maybe_unused]] Stripe& stripe, Key key) REQUIRES_SHARED(decision_mutex)
      REQUIRES(stripe.mutex) {
    return index_.find(key);
  }
  // What never changes of a slot, for which its stripe need not be locked; nullptr if there is none.
  const SlotSpec* spec_of(Key key) REQUIRES_SHARED(decision_mutex) {
    const Slot* slot = index_.find(key);
    return slot != nullptr ? &slot->spec() : nullptr;
  }
  // Carries the pending decision out on this slot, if it lacks it. Before anything else is done with it.
  // False: the slot is held, at the decision before.
  bool bring_up_to_date(Stripe& stripe, Slot& slot) REQUIRES_SHARED(decision_mutex)
      REQUIRES(stripe.mutex);

  // Whose contribution of that rank the slot is held with, be it here or not; nullptr if the slot is not
  // held, or not with one of that rank. REQUIRES: bring_up_to_date().
  const Origin* held_with(Stripe& stripe, const Slot& slot, uint32_t rank)
      REQUIRES_SHARED(decision_mutex) REQUIRES(stripe.mutex);
  // A contribution that the slot is held with was staged: takes the step if it was the last.
  void contributed(Stripe& stripe, Slot& slot) REQUIRES_SHARED(decision_mutex)
      REQUIRES(stripe.mutex);
  // Slot::squares() of the pending decision.
  std::optional<Sum> squares(Stripe& stripe, Slot& slot) REQUIRES_SHARED(decision_mutex)
      REQUIRES(stripe.mutex);

  // Slot::staged_squares() of all slots that the decision's one member has a gradient for, by key. None: one lacks it.
  std::optional<std::vector<Sum>> staged_squares(const Decision& alone)
      REQUIRES_SHARED(decision_mutex);

  // ---- reading as of a decision

  // Holds decisions from this one on for a reader of that id. Returns which one it is.
  uint64_t hold(uint64_t id, bool state) REQUIRES(decision_mutex);
  // Settles on one. False: it is not held.
  bool settle_hold(uint64_t id, uint64_t at) REQUIRES(decision_mutex);
  bool is_settled_hold(uint64_t id, uint64_t at) REQUIRES_SHARED(decision_mutex) {
    return holds_.is_settled(id, at);
  }
  void release_hold(uint64_t id) REQUIRES(decision_mutex);
  // A part of the slot as of that decision: none if it is gone, or, in `waits`, not there yet.
  std::optional<Part> part_at(Stripe& stripe, Slot& slot, uint16_t index, uint64_t at, bool& waits)
      REQUIRES_SHARED(decision_mutex) REQUIRES(stripe.mutex);

  // The same of all rows of a partition.
  std::optional<RowSnapshot> rows_at(Stripe& stripe, Slot& slot, uint64_t at, bool& waits)
      REQUIRES_SHARED(decision_mutex) REQUIRES(stripe.mutex);

  // The slot is about to become another one as of the same decision: whoever reads as of that one is told.
  void restoring(const Slot& slot) REQUIRES_SHARED(decision_mutex);

  // ---- being written elsewhere, and read back

  // All slots as they were at that decision, in no order, and the values of those that no decision changes, as they are. The
  // reader settles on it. None: a slot can't take it yet. Throws Error(VERSION_GONE) if the reader does not hold it.
  std::optional<TableImage> image(uint64_t reader, uint64_t at) REQUIRES(decision_mutex);
  // Whether it can still be read: rows that are assigned, and values that are restored, as of that very decision take the place of
  // what it has, and end its hold before, under the slot's lock. To be asked under that lock, before the slot is read.
  bool is_held(const TableImage& image) REQUIRES_SHARED(decision_mutex) {
    return is_settled_hold(image.reader, image.at);
  }
  // Bytes of a part of such a slot; 0: it is not there.
  uint64_t part_bytes(size_t part, const SlotImage& image) REQUIRES(decision_mutex);
  // Gives a slot what it was; a partition of a table part by part. Throws Error: BAD_ARGUMENT if it is not new, or of
  // other parts; OUT_OF_MEMORY.
  void load(const SlotImage& image, std::span<const BufferRef> parts) REQUIRES(decision_mutex);

  // ---- being kept in another process, too

  // All slots as they are, in no order. None: some wait for what the last decision left open.
  std::optional<std::vector<SlotCopy>> copies() REQUIRES(decision_mutex);
  // Copies contributions that wait in memory that somebody shares, as far as there is memory.
  void own_staged();
  // Settles what can; whether that is all.
  bool is_settled() REQUIRES(decision_mutex);
  // As load(), of a copy; `squares` is computed for the last decision.
  void load(const SlotImage& image, std::span<const BufferRef> parts, std::optional<double> squares)
      REQUIRES(decision_mutex);
  // This was the last one, and all slots have taken its step. REQUIRES: its number is version().
  void resume(const Decision& last) REQUIRES(decision_mutex);
  const IdRanges& dropped() const REQUIRES_SHARED(decision_mutex) { return dropped_; }
  void load_dropped(const std::vector<std::pair<uint64_t, uint64_t>>& ranges)
      REQUIRES(decision_mutex) {
    for (const auto& [first, last] : ranges) dropped_.insert_range(first, last);
  }

  // That life of a worker was sent the value as it is, of slots that are compensated.
  void note_base(const Life& life, Key key) REQUIRES_SHARED(decision_mutex);
  // The same of a value that it was sent elsewhere; empty: that is the value. Throws Error(BAD_ARGUMENT) for a slot that is
  // not compensated.
  void load_base(const Life& life, Key key, BufferRef base) REQUIRES(decision_mutex);

  // Nobody asks for changes any more, or they are in the way of who trains.
  void forget_changes() REQUIRES_SHARED(decision_mutex);
  // Nothing is kept for any hold: it is in the way of who trains.
  void give_up_holds() REQUIRES(decision_mutex);

  TableSize size() REQUIRES_SHARED(decision_mutex);
  // Of each table, by tensor id.
  std::map<uint64_t, RowCounts> row_counts() REQUIRES_SHARED(decision_mutex);

 private:
  struct Decided {
    Key key;
    Slot* slot;  // guarded by the stripe of the key
  };

  struct Checked {
    PendingDecision pending;
    size_t num_held = 0;  // slots that can't settle yet
  };

  // What has hyper-parameters of its own.
  using RuledGroup = std::pair<uint32_t, RuleKind>;

  // Buffers for each slot: those that the rule always has, or what a decision has asked for. A definition does not say
  // whether there is to be momentum, and to count with it always would refuse models that fit.
  uint64_t reserved_states(const RuledGroup& of) const REQUIRES(decision_mutex);
  // Room for what the decision's hyper-parameters ask for, before it changes anything. Throws Error(OUT_OF_MEMORY).
  void reserve_states(const PendingDecision& pending) REQUIRES(decision_mutex);
  // Each with its stripe locked.
  void for_each_slot(const RuledGroup& of, const std::function<void(Slot&)>& call)
      REQUIRES(decision_mutex);
  std::vector<Slot> make_slots(const TensorDefinition& definition) REQUIRES(decision_mutex);
  void insert(Slot slot) REQUIRES(decision_mutex);
  // Returns what was reserved for it, and is not in use.
  uint64_t erase(Key key) REQUIRES(decision_mutex);
  // Has the slots that settle() comes to after that place on their way from memory.
  void fetch_after(size_t place) REQUIRES_SHARED(decision_mutex);
  // Carries the pending decision out on the slot, which is ready, or has waited in vain. What readers hold is kept.
  void take_step(Slot& slot) REQUIRES_SHARED(decision_mutex);
  // Has that not fail any more: Slot::make_room_for_step().
  void make_room_for_step(Slot& slot) REQUIRES_SHARED(decision_mutex);
  void keep_for_readers(Slot& slot) REQUIRES_SHARED(decision_mutex);
  // Whether what failed may do without what readers hold of the slot, which is no longer kept then.
  bool gives_up_kept(Slot& slot, const Error& error) REQUIRES_SHARED(decision_mutex);
  // Lets go of what no hold wants,
  void let_go() REQUIRES(decision_mutex);
  // or of all that the slot keeps.
  void forget_kept(Slot& slot);
  // Throws Error(DECISION_GAP): the pending decision lacks its scale.
  void require_scale() const REQUIRES(decision_mutex);
  // What the pending decision still waits for will not come any more: there is none after it before all who promised
  // have said that it is here. REQUIRES: settle(-1).
  void finish_pending() REQUIRES(decision_mutex);
  void note_missing(const Slot& slot, const Decision& decision) REQUIRES(decision_mutex);
  Checked check(const Decision& decision) REQUIRES(decision_mutex);
  bool is_settled(const Slot& slot) const {
    return !applies_by_decision(slot.spec().rule) || slot.settled(version());
  }

  const std::shared_ptr<Backend> backend_;
  Counters& counters_;
  RankBook& ranks_;

  const uint64_t max_kept_bytes_;
  const std::shared_ptr<MemoryBudget> row_decisions_budget_;  // null: which rows change is not kept
  Holds holds_ GUARDED_BY(decision_mutex);
  std::atomic<uint64_t> kept_bytes_{0};

  Stripes stripes_;
  SlotIndex index_ GUARDED_BY(decision_mutex);
  std::unordered_map<uint64_t, TensorDefinition> definitions_ GUARDED_BY(decision_mutex);
  std::map<RuledGroup, uint64_t> asked_states_ GUARDED_BY(decision_mutex);
  IdRanges dropped_ GUARDED_BY(decision_mutex);
  std::vector<Decided> decided_ GUARDED_BY(decision_mutex);  // the slots that decisions change

  std::atomic<uint64_t> version_{0};  // written under the exclusive lock
  std::optional<PendingDecision> pending_ GUARDED_BY(decision_mutex);  // its number is version_
  std::atomic<size_t> num_unsettled_{0};   // slots that lack the pending decision
  std::atomic<size_t> num_held_{0};        // of them, those that can't take it yet
  std::atomic<size_t> next_to_settle_{0};  // runs around decided_
};

}  // namespace psstore
