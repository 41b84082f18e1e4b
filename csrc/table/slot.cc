#include "table/slot.h"

#include <cstring>

namespace psstore {
namespace {

// Whether this member's contribution counts in the slot. What a commit does not name does not, even if
// slices of it have arrived.
bool contributes(const Member& member, const SlotSpec& spec) {
  return member.has(tensor_of(spec.key));
}

void copy_elements(const PayloadSlice& from, const SlotSpec& spec, void* to) {
  if (from.num_bytes == 0) return;
  if (from.dtype == spec.dtype) {
    std::memcpy(to, from.data(), from.num_bytes);
  } else {
    convert(from.dtype, spec.dtype, from.data(), to, static_cast<int64_t>(spec.num_elems));
  }
}

std::string bytes_of(const BufferRef& buffer, size_t num_bytes) {
  return {reinterpret_cast<const char*>(buffer->data()), num_bytes};
}

}  // namespace

BufferRef Slot::destination(BufferPool& pool) const {
  return value_ && value_.unique() ? value_ : pool.allocate(spec_.num_bytes());
}

Change Slot::replace_value(BufferRef target) {
  const Change change = target.get() == value_.get() ? Change::kInPlace : Change::kOutOfPlace;
  value_ = std::move(target);
  return change;
}

void Slot::initialise(const PayloadSlice& from, BufferPool& pool) {
  BufferRef first = pool.allocate(spec_.num_bytes());
  copy_elements(from, spec_, first->data());
  value_ = std::move(first);
}

void Slot::initialise_with_zeros(BufferPool& pool) {
  value_ = pool.allocate_zeroed(spec_.num_bytes());
}

Change Slot::assign(const PayloadSlice& from, BufferPool& pool) {
  BufferRef target = destination(pool);
  copy_elements(from, spec_, target->data());
  ++version_;
  return replace_value(std::move(target));
}

Change Slot::add(const PayloadSlice& from, BufferPool& pool) {
  BufferRef target = destination(pool);
  const Contribution addend{from.data(), from.dtype, 1.0F};
  SliceUpdate update;
  update.rule = RuleKind::kAdd;
  update.dtype = spec_.dtype;
  update.num_elems = static_cast<int64_t>(spec_.num_elems);
  update.contributions = {&addend, 1};
  update.value_in = value_->data();
  update.value_out = target->data();
  reduce_update(update);
  ++version_;
  return replace_value(std::move(target));
}

bool Slot::check(const Decision& decision) const {
  bool any = false;
  for (const Member& member : decision.members()) {
    if (!contributes(member, spec_)) continue;
    const Origin& origin = member.origin;
    if (!initialised() || staging_.find(origin) == nullptr) {
      throw Error(ErrorCode::MISSING_CONTRIBUTION,
                  "decision " + std::to_string(decision.number()) + " counts on tensor " +
                      std::to_string(tensor_of(spec_.key)) + ", key " + std::to_string(spec_.key) +
                      ", from rank " + std::to_string(origin.rank) + " (incarnation " +
                      std::to_string(origin.incarnation) + ") in round " +
                      std::to_string(origin.round) + ", but " +
                      (initialised() ? "it was not pushed here" : "the tensor has no value yet"));
    }
    any = true;
  }
  return any;
}

Change Slot::settle(const PendingDecision& pending, BufferPool& pool) {
  const Decision& decision = pending.decision();
  const Change change = decision.skip() ? Change::kNone : step(pending, pool);
  staging_.release(decision.members());
  settled_ = decision.number();
  return change;
}

std::vector<Contribution> Slot::contributions(const Decision& decision) const {
  std::vector<Contribution> found;
  found.reserve(decision.members().size());
  for (const Member& member : decision.members()) {
    if (!contributes(member, spec_)) continue;
    const PayloadSlice& slice = staging_.find(member.origin)->slice;
    found.push_back({slice.data(), slice.dtype, member.weight});
  }
  return found;
}

Change Slot::step(const PendingDecision& pending, BufferPool& pool) {
  const Decision& decision = pending.decision();
  const std::vector<Contribution> gradients = contributions(decision);
  if (gradients.empty()) return Change::kNone;

  const Hyper& hyper = pending.hyper(spec_);
  const StateLayout layout = state_layout(spec_.rule, hyper);
  std::array<State, kMaxStates> state = state_;
  BufferRef target = destination(pool);
  SliceUpdate update;
  update.rule = spec_.rule;
  update.hyper = &hyper;
  update.step = num_steps_ + 1;
  update.dtype = spec_.dtype;
  update.num_elems = static_cast<int64_t>(spec_.num_elems);
  update.contributions = gradients;
  update.divisor = decision.divisor();
  update.value_in = value_->data();
  update.value_out = target->data();
  for (size_t i = 0; i < state.size(); ++i) {
    if (layout.names[i] == nullptr) continue;
    if (!state[i].buffer) {
      state[i] = {layout.names[i], pool.allocate(spec_.num_bytes())};
      update.state_is_new |= 1U << i;
    }
    update.state[i] = state[i].buffer->data();
  }
  reduce_update(update);

  state_ = std::move(state);
  ++num_steps_;
  version_ = decision.number();
  return replace_value(std::move(target));
}

size_t Slot::state_bytes() const {
  size_t total = 0;
  for (const State& state : state_) {
    if (state.buffer) total += spec_.num_bytes();
  }
  return total;
}

std::vector<std::pair<std::string, std::string>> Slot::dump() const {
  std::vector<std::pair<std::string, std::string>> named;
  if (initialised()) named.emplace_back("value", bytes_of(value_, spec_.num_bytes()));
  for (const State& state : state_) {
    if (state.buffer) named.emplace_back(state.name, bytes_of(state.buffer, spec_.num_bytes()));
  }
  std::string step(sizeof num_steps_, '\0');
  std::memcpy(step.data(), &num_steps_, sizeof num_steps_);
  named.emplace_back("step", std::move(step));
  return named;
}

}  // namespace psstore
