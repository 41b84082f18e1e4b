// What a shard holds for one key: value, rule state, version, staged contributions.
//
// Guarded by the lock of its stripe, every call. Value and rule state alone are shared beyond that lock:
// readers take a reference and keep it as long as they like, and what writes next looks whether one is
// left:
//
//   nobody reads      value ─► [ v7 ]         updated in place            value ─► [ v8 ]
//   somebody reads    value ─► [ v7 ] ◄─ r    old is read, new written    value ─► [ v8 ]   [ v7 ] ◄─ r
//
// Out of place costs no extra pass: the kernel reads one buffer and writes the other. If somebody reads each
// value in turn, the next one goes where the one before lay: who maps values (shm/value_view.h) finds them in
// one of two places. Rule state is read
// seldom, by checkpoints; a buffer that somebody reads is copied before the step, which is in place. All
// memory that a change needs is allocated before the first byte changes: if that throws, the slot is
// what it was.
//
// Where those bytes are and who does the arithmetic on them is the backend's matter (table/backend.h): a slot
// asks for memory and for work on it, and does not look at a byte.
//
// A slot is settled to a decision once that has done to it all that it will. Until then it is held if the
// decision concerns it and leaves something open; else it takes the step when it is touched next.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/buffer.h"
#include "kernels/update.h"
#include "rows/contribution.h"
#include "rows/row_counts.h"
#include "rows/row_decisions.h"
#include "rows/row_marks.h"
#include "rows/row_policy.h"
#include "table/backend.h"
#include "table/bases.h"
#include "table/change_log.h"
#include "table/published.h"
#include "table/staging.h"

namespace psstore {

// How a change reached the value.
enum class Change : uint8_t { kNone, kInPlace, kOutOfPlace };

// What can be read of a slot: a buffer, empty if there is none yet, and what it is the version of.
struct Part {
  BufferRef buffer;
  uint64_t version = 0;
};

// Of a partition of a table: in the place of the first state buffer.
inline constexpr size_t kCountedPart = 1;

// A slot without its bytes, as it was at one decision. Memory of these is the table of slots of a checkpoint's file.
struct SlotImage {
  static constexpr uint64_t kZeros = 1 << 8;

  Key key = 0;
  uint64_t version = 0;
  uint64_t num_steps = 0;
  uint64_t parts =
      0;  // bit i: part(i) has bytes; kZeros: the value is zeros, which take no memory; rows from kRowsShift on

  // Of a partition of a table: how many rows it has. Their records are part 0.
  // And part 1 is what their admission has counted, if it has.
  static constexpr int kRowsShift = 16;
  static constexpr uint64_t kCounted = 1 << kCountedPart;
  uint64_t num_rows() const { return parts >> kRowsShift; }
  static uint64_t parts_of_rows(uint64_t num_rows, bool has_counted = false) {
    return num_rows << kRowsShift | (has_counted ? kCounted : 0) | (num_rows > 0 ? 1 : 0);
  }
};

// A slot with its bytes and with what waits in it, on its way to a standby. A partition of many rows is several of them,
// of which the first has what waits.
struct SlotCopy {
  SlotImage image;
  std::array<BufferRef, 1 + kMaxStates> parts;  // empty: it has none
  size_t part_bytes = 0;
  std::optional<double> squares;  // of the last decision, if that needs a scale
  std::vector<StagedContribution> staged;
  std::vector<Bases::Base> bases;  // empty: it is the value

  uint64_t num_bytes() const {
    uint64_t num_parts = 0;
    for (const BufferRef& part : parts) num_parts += part ? 1 : 0;
    return num_parts * part_bytes;
  }
};

// Of records in one SlotCopy, more or less.
inline constexpr size_t kCopiedRowsBytes = 4u << 20;

class Slot {
 public:
  // `decision`: the last one there is; the slot has no part in it. `zeros`: it is initialised, with zeros, which take
  // memory once somebody uses them. `backend`: null if the slot has no rows.
  Slot(const SlotSpec& spec, uint64_t decision, bool zeros = false,
       const std::shared_ptr<Backend>& backend = nullptr);

  const SlotSpec& spec() const { return spec_; }
  bool initialised() const { return value_ || are_zeros_ || rows_ != nullptr; }

  // ---- its rows, if it is a partition of a table: in place of a value

  // REQUIRES: it has rows, as in all of these.
  const RowStore& rows() const { return *rows_; }
  RowCounts row_counts() const;
  // Whether what a contribution brings may become rows: a table is full else, and evicts none.
  bool has_room_for(const PayloadSlice& contribution) const;
  // Memory for the rows that the decision adds to those that are here, so that its step has it; with those of the one
  // before it, if the slot is still to take that step, too.
  void reserve_rows(const Decision& decision, const Decision* before);
  // New values of some of them, as they travel (rows/contribution.h), whose state starts anew. None, with nothing changed:
  // they are more than there may be.
  std::optional<Change> assign_rows(const PayloadSlice& from);
  // As of decision `at`. None: they are not kept.
  std::optional<RowSnapshot> rows_at(uint64_t at) const;
  // For somebody who keeps rows, what has changed since he read them. The first one has them begun, out of the budget, and
  // there are more of them where there are more rows. Null: there is no room.
  const RowMarks* marks(const std::shared_ptr<MemoryBudget>& budget);
  // From here on it keeps at which decision its rows change, out of the budget. REQUIRES: it is new.
  void note_row_decisions(const std::shared_ptr<MemoryBudget>& budget) {
    row_decisions_ = std::make_unique<RowDecisions>(settled_, budget);
  }
  // Places of the rows of a snapshot that may be others than at decision `since`; they ascend.
  std::vector<uint32_t> changed_places(const RowSnapshot& then, uint64_t since) const;

  // ---- memory that it will need

  // What is to be reserved beyond what was, for its value and so many state buffers.
  uint64_t bytes_to_reserve(uint64_t num_states, const Backend& backend) const;
  // It was.
  void reserved(uint64_t num_bytes) { reserved_bytes_ += num_bytes; }
  // That no memory has come of.
  uint64_t reserved_bytes() const { return reserved_bytes_; }

  // ---- its value

  // Allocates what assign(), or add(), of the slice needs where somebody reads the value. False: nothing is needed.
  bool make_room(const PayloadSlice& from, bool is_added, Backend& backend);
  // Gives it back, unused.
  void leave_room() { last_ = {}; }

  // Makes memory of zeros that have none. Before value(), part() and follow().
  void make_zeros(Backend& backend);
  // The value, shared; empty if the slot is not initialised.
  BufferRef value() const { return value_; }

  // Every change of the value makes it larger. Of assign and add tensors it is the number of writes; else
  // the number of the last decision that changed the value, or more if values were restored.
  // 0: still the initial value.
  uint64_t version() const { return version_; }

  // The value (0) and its version, or a state buffer (from 1 on) and the number of steps, shared.
  // REQUIRES: index <= kMaxPart.
  Part part(uint16_t index) const;

  // What is sent to somebody who follows the slot by deltas (table/published.h): the first one makes it
  // published, as it is, unless the backend has no room for that: then it is sent values. `whole`: no delta, as it
  // turned out to say nothing. `goes_on`: another process may have published something before. REQUIRES: initialised(),
  // follows_as() of its dtype.
  Published::Answer follow(uint64_t wanted_version, DType encoding, bool whole, bool goes_on,
                           const std::shared_ptr<Backend>& backend);

  // What is sent to somebody who has version `wanted_version` - 1 of it in that dtype, bit for bit: what has changed since,
  // or the whole. `then`: the value as it is read. The first one has the slot keep what it needs for that, out of the budget,
  // if it has room. REQUIRES: host memory; travels_as() that dtype.
  Finding changes(const Part& then, DType dtype, uint64_t wanted_version,
                  const std::shared_ptr<MemoryBudget>& budget, Backend& backend);
  // That life of a worker is sent the value. Whether that is kept, as the base of gradients to come: not if contributions
  // are not compensated. The first time of a rank memory is reserved for it: Error(OUT_OF_MEMORY).
  bool note_base(const Life& life, Backend& backend);
  // It was sent this elsewhere. REQUIRES: has_bases().
  void load_base(const Life& life, BufferRef base, Backend& backend);
  bool has_bases() const { return bases_ != nullptr; }

  // Nobody asks for changes any more.
  void forget_changes() {
    change_logs_.clear();
    marks_ = nullptr;
  }

  // First values; they do not count as a write. REQUIRES: !initialised().
  void initialise(const PayloadSlice& from, Backend& backend);

  // Bytes of a part of such an image.
  uint64_t part_bytes(size_t part, const SlotImage& image) const;
  // What it was when it was written elsewhere. An empty buffer: it has no such part. REQUIRES: it is new.
  void load(const SlotImage& image, std::span<const BufferRef> parts, Backend& backend);
  // As it is. REQUIRES: settled to `decision`, the last one; host memory.
  void copy_to(std::vector<SlotCopy>& copies, uint64_t decision, Backend& backend) const;
  // The sum of squares that was computed elsewhere for `decision`. REQUIRES: settled to it.
  void load_squares(uint64_t decision, double squares) { squares_ = {decision, {squares, {}, 0}}; }

  // New values; also the first ones.
  Change assign(const PayloadSlice& from, Backend& backend);
  // REQUIRES: initialised().
  Change add(const PayloadSlice& from, Backend& backend);

  // A value from elsewhere, which those see as new who have seen this slot, or the shard at `decision`. Who
  // follows it is sent the whole of it.
  Change restore_value(const PayloadSlice& from, uint64_t decision, Backend& backend);
  // State buffer `index` and the number of steps; without bytes the buffer is one that was never made.
  // REQUIRES: largest_state_layout() of the rule uses it.
  void restore_state(size_t index, const PayloadSlice& from, uint64_t num_steps, Backend& backend);

  Staging& staging() { return staging_; }
  const Staging& staging() const { return staging_; }

  // Whether the decision concerns the slot: a member of it has a gradient for the tensor.
  bool counted(const Decision& decision) const;
  // Whether a member has a gradient for the tensor, as the decision says, and has not staged exactly its round.
  bool lacks(const Member& member) const;

  bool settled(uint64_t decision) const { return settled_ >= decision; }
  // Whether it can settle now: nothing that the decision leaves open concerns it, or is missing still.
  // REQUIRES: the decision follows the one that the slot is settled to, as in settle().
  bool ready(const PendingDecision& pending) const;
  // Bytes of values that carrying it out changes, at most: of rows those alone that are contributed to.
  uint64_t step_bytes(const PendingDecision& pending) const;
  // Takes the memory that settle() needs where somebody reads what it changes, so that it has it: all but for rows that are
  // evicted. Throws Error(OUT_OF_MEMORY), with nothing changed; again, it takes no more.
  void make_room_for_step(const PendingDecision& pending, Backend& backend);
  // Carries the decision out with the contributions that are here, and lets go of them.
  Change settle(const PendingDecision& pending, Backend& backend);

  // ---- what it was, for those who read it as of a decision (table/holds.h)

  // Value and rule state are as they are since the first of these decisions, and up to the second.
  uint64_t unchanged_since() const { return since_; }
  uint64_t settled_to() const { return settled_; }
  // The decision changes it, unless all it counts on is missing.
  bool will_change(const PendingDecision& pending) const {
    return !pending.skip() && counted(pending.decision());
  }
  // Keeps references to the value, and to rule state if `state`, which are what they are up to decision `to`. Returns how
  // many bytes they may cost: none, if they were kept before.
  uint64_t keep(uint64_t to, bool state);
  // The same as part(), as of decision `at`. None: it is not kept.
  std::optional<Part> kept_part(uint16_t index, uint64_t at) const;
  // What it was as of decision `at`. None: it is not kept. REQUIRES: settled to that, if decisions change it.
  std::optional<SlotImage> image(uint64_t at) const;
  // Lets go of what `wanted` does not want of [from, to]. Returns how many bytes it cost.
  template <typename Wanted>
  uint64_t let_go(Wanted wanted) {
    uint64_t num_bytes = 0;
    std::erase_if(kept_, [&](const KeptParts& kept) {
      if (wanted(kept.from, kept.to)) return false;
      num_bytes += kept.num_bytes;
      return true;
    });
    return num_bytes;
  }
  // Whether there is anything in it for readers alone.
  bool keeps_any() const { return !kept_.empty() || !change_logs_.empty(); }

  // Has value and rule state on their way from memory, for a step that comes soon. Contributions lie one
  // after the other in their frames: the step of the slot before has begun with them.
  void fetch() const;

  // The sum of squares of the gradient that the decision reduces to, before any scale: computed at most
  // once, and remembered until the next decision's. None if the decision needs no scale, or does not
  // concern the slot. REQUIRES: settled to the decision, or its contributions are here.
  std::optional<Sum> squares(const Decision& decision, Backend& backend);

  // The same of what the one member of a decision has staged, before there is one on it. REQUIRES: it has.
  Sum staged_squares(const Decision& alone, Backend& backend) const;

  // Bytes of rule state.
  size_t state_bytes() const;
  // Bytes of values that are kept as bases, or for the next value.
  size_t base_bytes() const { return bases_ ? bases_->num_buffers(value_) * spec_.num_bytes() : 0; }
  // Bytes that are kept for those who follow it, by deltas or by its changes.
  size_t published_bytes() const;
  // Raw bytes of value, rule state and step by name, as torch names them; of rows their records, and what admission has
  // counted.
  // Waits for the backend.
  std::vector<std::pair<std::string, std::string>> dump(Backend& backend) const;

 private:
  struct State {
    const char* name = nullptr;  // of a StateLayout: lives for ever
    BufferRef buffer;
  };

  struct KeptParts {
    uint64_t from;
    uint64_t to;
    uint64_t version;
    std::array<BufferRef, 1 + kMaxStates> parts;
    RowSnapshot rows;
    bool state;
    uint64_t num_steps;
    uint64_t num_bytes;
  };

  struct Squares {
    uint64_t decision = 0;
    Sum sum;
  };

  // What is changed next: the buffer itself if nobody else refers to it, else new memory, for the first one out of what
  // is reserved.
  BufferRef own_or_new(const BufferRef& buffer, Backend& backend);
  // The same with what is in the buffer.
  BufferRef own_copy(const BufferRef& buffer, Backend& backend);
  // Where the next value goes: the value's own memory if nobody else refers to it, else that of the value
  // before it, or new memory.
  BufferRef destination(Backend& backend);
  // The received slice as a value: where it lies if it may stay there, else copied to a destination().
  BufferRef received(const PayloadSlice& from, Backend& backend);
  // Makes `target`, with the new value in it, the value.
  Change replace_value(BufferRef target, const Backend& backend);
  // What the members have staged, in rank order.
  std::vector<Contribution> contributions(const Decision& decision) const;
  // The sum of squares of what they reduce to.
  Sum sum_of_squares(const Decision& decision, std::span<const Contribution> gradients,
                     Backend& backend) const;
  // The reduction of them: what a step and a sum of squares have in common.
  SliceUpdate reduction(const Decision& decision, std::span<const Contribution> gradients) const;
  void sort_members(const Decision& decision, SliceUpdate& update) const;
  // What the one member of the decision was sent, from where its gradient is compensated; empty: it is taken as it is.
  // REQUIRES: has_bases().
  BufferRef base_of(const Decision& decision) const;
  void make_room_for_base(const Life& life, Backend& backend);
  // The state buffers as the step may write to them, its own and new ones.
  std::array<State, kMaxStates> writable_state(const StateLayout& layout, Backend& backend);
  Change step(const PendingDecision& pending, Backend& backend);
  // The same for rows.
  std::vector<RowContribution> row_contributions(const Decision& decision) const;
  uint64_t step_bytes_of_rows(const Decision& decision) const;
  Change step_of_rows(const PendingDecision& pending, Backend& backend);
  void make_room_for_step_of_rows(const Decision& decision, Backend& backend);
  // The rows of some ids, with memory for all that changing them needs; kNoRow: it is to be added.
  struct RowsToChange {
    std::vector<RowNumber> rows;
    Change change = Change::kInPlace;
    uint64_t highest = 0;  // of the ids that had their rows so far
  };
  void make_room(std::span<const uint64_t> ids, RowsToChange& found, const RowPolicy::Plan& plan);
  void count_rows(const MergedRows& merged, const RowsToChange& found, Backend& backend);
  // Has what admission has counted be nobody else's, from its first time on.
  void own_counted(Backend& backend);
  RowNumber there_or_new(std::span<const uint64_t> ids, size_t i, RowsToChange& found,
                         float initial_sum);
  // Begins a change of rows, before any of it, by that decision: at most so many are new.
  void begin_marks(uint64_t decision, size_t most_new);
  // REQUIRES: there are marks.
  void mark(uint64_t id) { marks_->mark(hash_of_id(id)); }
  // The row was changed by that decision.
  void note_use(RowNumber row, uint64_t decision);
  bool counted_here(const Decision& decision) const;
  // What it rounds rows by, if they are bfloat16.
  RoundingLots lots_of(const Decision& decision) const;
  double squares_of_rows(const Decision& decision) const;
  void took_step(uint64_t decision);
  std::optional<SlotImage> image_of_rows(uint64_t at) const;
  // Records, as they lie.
  std::string dump_rows() const;
  void load_rows(const SlotImage& image, std::span<const BufferRef> parts, Backend& backend);
  // `whole`: the copy, but for its rows.
  void copy_rows_to(std::vector<SlotCopy>& copies, SlotCopy whole, Backend& backend) const;

  const SlotSpec spec_;
  std::unique_ptr<RowStore> rows_;  // null: it has a value
  std::unique_ptr<RowPolicy> row_policy_;
  std::unique_ptr<RowMarks> marks_;              // while somebody keeps rows
  std::unique_ptr<RowDecisions> row_decisions_;  // null: nobody asks which rows have changed
  BufferRef value_;
  bool are_zeros_;  // its value, which has no memory yet
  BufferRef
      last_;  // the memory that the value was in before, if somebody read it when it was replaced; or room for the next
  std::array<State, kMaxStates> state_;  // allocated when the rule first needs it
  int64_t num_steps_ = 0;                // updates applied: torch's per-parameter step
  uint64_t version_ = 0;
  uint64_t since_ = 0;  // less than the version after a restore, which is no decision
  uint64_t reserved_bytes_ = 0;
  uint64_t settled_;  // last decision that has done to it all that it will
  Squares squares_;   // the last ones asked for
  Staging staging_;
  std::unique_ptr<Bases> bases_;        // null: contributions are not compensated
  std::optional<Published> published_;  // once somebody follows it
  std::vector<ChangeLog> change_logs_;  // by the dtypes in which somebody is told of its changes
  std::vector<KeptParts> kept_;
};

}  // namespace psstore
