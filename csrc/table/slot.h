// What a shard holds for one key: value, rule state, version, staged contributions.
//
// Guarded by the lock of its stripe, every call. The value alone is shared beyond that lock: readers
// take a reference and keep it as long as they like, and what writes next looks whether one is left:
//
//   nobody reads      value ─► [ v7 ]         updated in place            value ─► [ v8 ]
//   somebody reads    value ─► [ v7 ] ◄─ r    old is read, new written    value ─► [ v8 ]   [ v7 ] ◄─ r
//
// Out of place costs no extra pass: the kernel reads one buffer and writes the other. Rule state is
// never handed out, so it is always updated in place. All memory that a change needs is allocated before
// the first byte changes: if that throws, the slot is what it was.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/buffer.h"
#include "kernels/update.h"
#include "table/staging.h"

namespace psstore {

// How a change reached the value.
enum class Change : uint8_t { kNone, kInPlace, kOutOfPlace };

class Slot {
 public:
  // `decision`: the last one there is; the slot has no part in it.
  Slot(const SlotSpec& spec, uint64_t decision) : spec_(spec), settled_(decision) {}

  const SlotSpec& spec() const { return spec_; }
  bool initialised() const { return static_cast<bool>(value_); }

  // The value, shared; empty if the slot is not initialised.
  BufferRef value() const { return value_; }

  // Number of the last decision that changed the value; for assign and add tensors the number of writes.
  // 0: still the initial value.
  uint64_t version() const { return version_; }

  // First values; they do not count as a write. REQUIRES: !initialised().
  void initialise(const PayloadSlice& from, BufferPool& pool);
  void initialise_with_zeros(BufferPool& pool);

  // New values; also the first ones.
  Change assign(const PayloadSlice& from, BufferPool& pool);
  // REQUIRES: initialised().
  Change add(const PayloadSlice& from, BufferPool& pool);

  Staging& staging() { return staging_; }
  const Staging& staging() const { return staging_; }

  // Whether `decision` can be carried out: each member has staged exactly its round, or lacks the
  // tensor. Throws Error(MISSING_CONTRIBUTION) that names who and what.
  // Returns whether there is anything to reduce.
  bool check(const Decision& decision) const;

  bool settled(uint64_t decision) const { return settled_ >= decision; }
  // Carries the decision out and lets go of the contributions it used. REQUIRES: check() was fine, and
  // the decision follows the one that the slot is settled to.
  Change settle(const PendingDecision& pending, BufferPool& pool);

  // Bytes of rule state.
  size_t state_bytes() const;
  // Raw bytes of value, rule state and step by name, as torch names them.
  std::vector<std::pair<std::string, std::string>> dump() const;

 private:
  struct State {
    const char* name = nullptr;  // of a StateLayout: lives for ever
    BufferRef buffer;
  };

  // Where the next value goes: the value's own memory if nobody else refers to it, else new memory.
  BufferRef destination(BufferPool& pool) const;
  // Makes `target`, a destination() with the new value in it, the value.
  Change replace_value(BufferRef target);
  // What the members have staged, in rank order.
  std::vector<Contribution> contributions(const Decision& decision) const;
  Change step(const PendingDecision& pending, BufferPool& pool);

  const SlotSpec spec_;
  BufferRef value_;
  std::array<State, kMaxStates> state_;  // allocated when the rule first needs it
  int64_t num_steps_ = 0;                // updates applied: torch's per-parameter step
  uint64_t version_ = 0;
  uint64_t settled_;  // last decision looked at
  Staging staging_;
};

}  // namespace psstore
