#include "table/slot.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/breakable_rules.h"

namespace psstore {
namespace {

// Whether this member's contribution counts in the slot. What a commit does not name does not, even if
// slices of it have arrived.
bool contributes(const Member& member, const SlotSpec& spec) {
  return member.has(tensor_of(spec.key));
}

void copy_elements(const PayloadSlice& from, const SlotSpec& spec, void* to, Backend& backend) {
  if (from.num_bytes == 0) return;
  if (from.dtype == spec.dtype) {
    backend.copy(to, from.data(), from.num_bytes);
  } else {
    backend.convert(from.dtype, spec.dtype, from.data(), to, static_cast<int64_t>(spec.num_elems));
  }
}

}  // namespace

Slot::Slot(const SlotSpec& spec, uint64_t decision, bool zeros,
           const std::shared_ptr<Backend>& backend)
    : spec_(spec), are_zeros_(zeros && !spec.has_rows()), settled_(decision) {
  if (spec.compensation != 0) bases_ = std::make_unique<Bases>();
  if (!spec.has_rows()) return;
  rows_ = std::make_unique<RowStore>(
      spec.row_shape(), spec.rows.first_values,
      [backend](size_t num_bytes) { return backend->allocate_rows(num_bytes); }, spec.key);
  row_policy_ = std::make_unique<RowPolicy>(spec.rows.bounds, spec.rows.first_values.seed);
}

// Rows take memory as they come, but for what admission counts them in.
uint64_t Slot::bytes_to_reserve(uint64_t num_states, const Backend& backend) const {
  const uint64_t part_bytes = rows_ != nullptr ? row_policy_->counted_bytes() : spec_.num_bytes();
  if (rows_ != nullptr && part_bytes == 0) return 0;
  const uint64_t num_bases = bases_ ? bases_->all().size() : 0;
  const auto num_states_held = static_cast<uint64_t>(
      std::ranges::count_if(state_, [](const State& s) { return bool(s.buffer); }));
  const uint64_t num_held = (value_ ? 1 : 0) + num_states_held + (bases_ ? bases_->num_drawn() : 0);
  const uint64_t one = backend.footprint(part_bytes);
  const uint64_t covered = reserved_bytes_ + (backend.counts_use() ? num_held * one : 0);
  const uint64_t needed = (1 + num_states + num_bases) * one;
  return needed - std::min(needed, covered);
}

bool Slot::make_room(const PayloadSlice& from, bool is_added, Backend& backend) {
  const bool is_read = value_ && !value_.unique();
  if (!is_read || (last_ && last_.unique())) return false;
  const bool is_kept = !is_added && from.num_bytes > 0 && from.dtype == spec_.dtype &&
                       backend.keep(from.payload, from.offset, from.num_bytes);
  if (is_kept) return false;
  last_ = backend.allocate(spec_.num_bytes());
  return true;
}

void Slot::make_zeros(Backend& backend) {
  if (!are_zeros_) return;
  value_ = backend.allocate_reserved(spec_.num_bytes(), reserved_bytes_);
  backend.zero(value_->data(), spec_.num_bytes());
  are_zeros_ = false;
}

BufferRef Slot::own_or_new(const BufferRef& buffer, Backend& backend) {
  if (!buffer) return backend.allocate_reserved(spec_.num_bytes(), reserved_bytes_);
  return buffer.unique() ? buffer : backend.allocate(spec_.num_bytes());
}

BufferRef Slot::own_copy(const BufferRef& buffer, Backend& backend) {
  BufferRef own = own_or_new(buffer, backend);
  const bool is_copy = buffer && own.get() != buffer.get();
  if (is_copy) backend.copy(own->data(), buffer->data(), spec_.num_bytes());
  return own;
}

BufferRef Slot::destination(Backend& backend) {
  if (last_ && last_.unique() && value_ && !value_.unique()) return last_;
  if (bases_ && value_ && !value_.unique()) {
    return bases_->next(spec_.num_bytes(), reserved_bytes_, backend);
  }
  return own_or_new(value_, backend);
}

BufferRef Slot::received(const PayloadSlice& from, Backend& backend) {
  if (from.num_bytes > 0 && from.dtype == spec_.dtype) {
    if (BufferRef kept = backend.keep(from.payload, from.offset, from.num_bytes)) {
      if (!value_) backend.draw(spec_.num_bytes(), reserved_bytes_);
      return kept;
    }
  }
  BufferRef target = destination(backend);
  copy_elements(from, spec_, target->data(), backend);
  return target;
}

Change Slot::replace_value(BufferRef target, const Backend& backend) {
  const Change change = target.get() == value_.get() ? Change::kInPlace : Change::kOutOfPlace;
  last_ = {};
  are_zeros_ = false;
  if (change == Change::kOutOfPlace) {
    const bool is_read = value_ && !value_.unique();
    if (is_read && backend.keeps_places()) last_ = std::move(value_);
    value_ = std::move(target);
  }
  return change;
}

void Slot::initialise(const PayloadSlice& from, Backend& backend) {
  value_ = received(from, backend);
}

Change Slot::assign(const PayloadSlice& from, Backend& backend) {
  BufferRef target = received(from, backend);
  ++version_;
  return replace_value(std::move(target), backend);
}

Change Slot::add(const PayloadSlice& from, Backend& backend) {
  make_zeros(backend);
  BufferRef target = destination(backend);
  const Contribution addend{from.data(), from.dtype, 1.0F, from.num_bytes};
  SliceUpdate update;
  update.rule = RuleKind::kAdd;
  update.dtype = spec_.dtype;
  update.num_elems = static_cast<int64_t>(spec_.num_elems);
  update.contributions = {&addend, 1};
  update.value_in = value_->data();
  update.value_out = target->data();
  backend.reduce_update(update);
  ++version_;
  return replace_value(std::move(target), backend);
}

Change Slot::restore_value(const PayloadSlice& from, uint64_t decision, Backend& backend) {
  BufferRef target = received(from, backend);
  version_ = std::max(version_, decision) + 1;
  since_ = decision;
  published_.reset();
  if (bases_) bases_->forget();
  return replace_value(std::move(target), backend);
}

void Slot::restore_state(size_t index, const PayloadSlice& from, uint64_t num_steps,
                         Backend& backend) {
  State restored;
  if (from.num_bytes > 0) {
    restored.name = largest_state_layout(spec_.rule).names[index];
    restored.buffer = own_or_new(state_[index].buffer, backend);
    backend.copy(restored.buffer->data(), from.data(), from.num_bytes);
  }
  state_[index] = std::move(restored);
  num_steps_ = static_cast<int64_t>(num_steps);
}

Part Slot::part(uint16_t index) const {
  if (index == 0) return {value_, version_};
  return {state_[index - 1U].buffer, static_cast<uint64_t>(num_steps_)};
}

bool Slot::note_base(const Life& life, Backend& backend) {
  if (!bases_ || !value_) return false;
  make_room_for_base(life, backend);
  const bool moves = holds(BreakableRule::kBASES_MOVE) || !bases_->of(life);
  if (moves) bases_->note(life, value_);
  return moves;
}

void Slot::load_base(const Life& life, BufferRef base, Backend& backend) {
  make_room_for_base(life, backend);
  bases_->note(life, std::move(base));
}

void Slot::make_room_for_base(const Life& life, Backend& backend) {
  if (bases_->has_rank(life.rank)) return;
  const uint64_t num_bytes = backend.footprint(spec_.num_bytes());
  backend.reserve(num_bytes);
  reserved_bytes_ += num_bytes;
}

BufferRef Slot::base_of(const Decision& decision) const {
  if (decision.members().size() != 1) return {};
  BufferRef base = bases_->of(decision.members().front().origin.life());
  if (!bases_->all().empty() && !holds(BreakableRule::kBASES_ARE_THEIR_OWN)) {
    base = bases_->all().front().value;
  }
  return base.get() == value_.get() ? BufferRef() : base;
}

Published::Answer Slot::follow(uint64_t wanted_version, DType encoding, bool whole, bool goes_on,
                               const std::shared_ptr<Backend>& backend) {
  if (!published_) {
    try {
      published_.emplace(value_, version_, spec_.num_elems, goes_on, backend);
    } catch (const Error&) {
      return {value_, spec_.dtype};
    }
  }
  published_->follow(value_, version_, encoding, *backend);
  return whole ? published_->whole() : published_->answer(wanted_version, encoding);
}

Finding Slot::changes(const Part& then, DType dtype, uint64_t wanted_version,
                      const std::shared_ptr<MemoryBudget>& budget, Backend& backend) {
  auto log = std::ranges::find(change_logs_, dtype, &ChangeLog::dtype);
  try {
    if (log == change_logs_.end()) {
      log = change_logs_.emplace(log, dtype, spec_.num_elems, budget);
    }
    return log->find(then.buffer, then.version, spec_.dtype, wanted_version, backend);
  } catch (const Error&) {
    std::erase_if(change_logs_, [=](const ChangeLog& one) { return one.dtype() == dtype; });
    return {then.buffer, spec_.dtype, dtype, spec_.num_elems};
  }
}

size_t Slot::published_bytes() const {
  size_t total = published_ ? published_->num_bytes() : 0;
  for (const ChangeLog& log : change_logs_) total += log.num_bytes();
  if (marks_) total += marks_->num_bytes();
  if (row_decisions_) total += row_decisions_->num_bytes();
  return total;
}

// ---- what it was ------------------------------------------------------------------------------------

uint64_t Slot::keep(uint64_t to, bool state) {
  if (!kept_.empty() && kept_.back().to == to) return 0;
  KeptParts kept{.from = since_,
                 .to = to,
                 .version = version_,
                 .parts = {value_},
                 .rows = rows_ != nullptr ? rows_->snapshot() : RowSnapshot(),
                 .state = state,
                 .num_steps = static_cast<uint64_t>(num_steps_),
                 .num_bytes = rows_ != nullptr ? rows_->num_bytes() : spec_.num_bytes()};
  for (size_t i = 0; state && i < state_.size(); ++i) {
    kept.parts[1 + i] = state_[i].buffer;
    if (state_[i].buffer) kept.num_bytes += spec_.num_bytes();
  }
  kept_.push_back(std::move(kept));
  return kept_.back().num_bytes;
}

std::optional<Part> Slot::kept_part(uint16_t index, uint64_t at) const {
  for (const KeptParts& kept : kept_) {
    if (at < kept.from || kept.to < at) continue;
    if (index == 0) return Part{kept.parts[0], kept.version};
    if (kept.state) return Part{kept.parts[index], kept.num_steps};
  }
  return std::nullopt;
}

std::optional<SlotImage> Slot::image(uint64_t at) const {
  if (rows_ != nullptr) return image_of_rows(at);
  const auto parts_of = [](const BufferRef& value, auto state) {
    uint64_t parts = value ? 1 : 0;
    for (size_t i = 0; i < kMaxStates; ++i) parts |= state(i) ? uint64_t{2} << i : 0;
    return parts;
  };
  if (!applies_by_decision(spec_.rule) || since_ <= at) {
    const uint64_t zeros = are_zeros_ && !value_ ? SlotImage::kZeros : 0;
    const auto has_state = [this](size_t i) { return static_cast<bool>(state_[i].buffer); };
    return SlotImage{spec_.key, version_, static_cast<uint64_t>(num_steps_),
                     zeros | parts_of(value_, has_state)};
  }
  for (const KeptParts& kept : kept_) {
    if (at < kept.from || kept.to < at || !kept.state) continue;
    const auto has_state = [&kept](size_t i) { return static_cast<bool>(kept.parts[1 + i]); };
    return SlotImage{spec_.key, kept.version, kept.num_steps, parts_of(kept.parts[0], has_state)};
  }
  return std::nullopt;
}

void Slot::load(const SlotImage& image, std::span<const BufferRef> parts, Backend& backend) {
  const auto loaded = [&](const BufferRef& buffer) {
    return received({buffer, 0, spec_.num_bytes(), spec_.dtype}, backend);
  };
  if (rows_ != nullptr) load_rows(image, parts, backend);
  for (size_t i = 1; rows_ == nullptr && i < parts.size(); ++i) {
    if (!parts[i]) continue;
    state_[i - 1] = {largest_state_layout(spec_.rule).names[i - 1],
                     own_or_new(BufferRef(), backend)};
    backend.copy(state_[i - 1].buffer->data(), parts[i]->data(), spec_.num_bytes());
  }
  if (rows_ == nullptr && !parts.empty() && parts[0]) replace_value(loaded(parts[0]), backend);
  version_ = image.version;
  since_ = std::min(image.version, settled_);
  num_steps_ = static_cast<int64_t>(image.num_steps);
}

// ---- decisions ------------------------------------------------------------------------------------

bool Slot::counted(const Decision& decision) const {
  const std::vector<Member>& members = decision.members();
  return std::any_of(members.begin(), members.end(),
                     [this](const Member& member) { return contributes(member, spec_); });
}

bool Slot::lacks(const Member& member) const {
  return contributes(member, spec_) && (!initialised() || staging_.find(member.origin) == nullptr);
}

bool Slot::ready(const PendingDecision& pending) const {
  const Decision& decision = pending.decision();
  if (pending.lacks_scale()) return !counted(decision);
  const auto is_here = [this](const Member& member) { return !lacks(member); };
  return !decision.early() || std::ranges::all_of(decision.members(), is_here);
}

void Slot::copy_to(std::vector<SlotCopy>& copies, uint64_t decision, Backend& backend) const {
  SlotCopy copy;
  copy.image = *image(std::max(decision, since_));
  copy.part_bytes = spec_.num_bytes();
  for (uint16_t i = 0; i <= kMaxStates; ++i) copy.parts[i] = part(i).buffer;
  if (squares_.decision == decision && decision > 0) copy.squares = squares_.sum.value;
  copy.staged = staging_.all();
  for (size_t i = 0; bases_ && i < bases_->all().size(); ++i) {
    const auto& [life, base] = bases_->all()[i];
    if (base) copy.bases.push_back({life, base.get() == value_.get() ? BufferRef() : base});
  }
  if (rows_ != nullptr) {
    copy_rows_to(copies, std::move(copy), backend);
  } else {
    copies.push_back(std::move(copy));
  }
}

std::optional<Sum> Slot::squares(const Decision& decision, Backend& backend) {
  if (!decision.needs_scale()) return std::nullopt;
  if (!settled(decision.number()) && squares_.decision != decision.number()) {
    const std::vector<Contribution> gradients = contributions(decision);
    if (gradients.empty()) return std::nullopt;
    squares_ = {decision.number(), sum_of_squares(decision, gradients, backend)};
  }
  if (squares_.decision != decision.number()) return std::nullopt;
  return squares_.sum;
}

Sum Slot::staged_squares(const Decision& alone, Backend& backend) const {
  return sum_of_squares(alone, contributions(alone), backend);
}

Sum Slot::sum_of_squares(const Decision& decision, std::span<const Contribution> gradients,
                         Backend& backend) const {
  if (rows_ != nullptr) return {squares_of_rows(decision), {}, 0};
  return backend.reduced_squares(reduction(decision, gradients));
}

uint64_t Slot::step_bytes(const PendingDecision& pending) const {
  return rows_ == nullptr ? spec_.num_bytes() : step_bytes_of_rows(pending.decision());
}

// Where the value goes if it can't stay where it is waits in the place of the one before it, as for writes.
void Slot::make_room_for_step(const PendingDecision& pending, Backend& backend) {
  if (pending.skip() || contributions(pending.decision()).empty()) return;
  if (rows_ != nullptr) return make_room_for_step_of_rows(pending.decision(), backend);
  make_zeros(backend);
  if (!value_.unique()) last_ = destination(backend);
  for (State& one : state_) {
    if (one.buffer) one.buffer = own_copy(one.buffer, backend);
  }
}

Change Slot::settle(const PendingDecision& pending, Backend& backend) {
  const Decision& decision = pending.decision();
  squares(decision,
          backend);  // before the contributions go: the scale may have come from elsewhere
  const Change change = pending.skip() ? Change::kNone : step(pending, backend);
  staging_.release(decision);
  settled_ = decision.number();
  return change;
}

void Slot::fetch() const {
  const size_t num_bytes = std::min<size_t>(spec_.num_bytes(), kFetchedAheadBytes);
  if (value_) value_.fetch(num_bytes);
  for (const State& state : state_) {
    if (state.buffer) state.buffer.fetch(num_bytes);
  }
}

std::vector<Contribution> Slot::contributions(const Decision& decision) const {
  std::vector<Contribution> found;
  found.reserve(decision.members().size());
  for (const Member& member : decision.members()) {
    if (!contributes(member, spec_) || !initialised()) continue;
    const StagedContribution* staged = staging_.find(member.origin);
    if (staged == nullptr) continue;
    const PayloadSlice& slice = staged->slice;
    const float weight = spec_.reduction.sorts() ? 1 / member.loss_scale : member.weight;
    found.push_back({slice.data(), slice.dtype, weight, slice.num_bytes});
  }
  return found;
}

SliceUpdate Slot::reduction(const Decision& decision,
                            std::span<const Contribution> gradients) const {
  SliceUpdate update;
  update.dtype = spec_.dtype;
  update.num_elems = static_cast<int64_t>(spec_.num_elems);
  update.contributions = gradients;
  update.divisor = decision.divisor();
  if (spec_.reduction.sorts()) sort_members(decision, update);
  return update;
}

// Whoever has no gradient counts as zeros, as in a sum: one that is alone with its gradient is outvoted, too.
void Slot::sort_members(const Decision& decision, SliceUpdate& update) const {
  const auto num_members = static_cast<uint32_t>(decision.members().size());
  const uint32_t num_dropped = spec_.reduction.num_dropped(num_members);
  const auto num_present = static_cast<uint32_t>(update.contributions.size());
  update.sorted = {num_members - num_present, num_dropped};
  update.divisor = num_members - 2 * num_dropped;
  if (!decision.averages()) update.divisor /= num_members;
}

std::array<Slot::State, kMaxStates> Slot::writable_state(const StateLayout& layout,
                                                         Backend& backend) {
  std::array<State, kMaxStates> writable;
  for (size_t i = 0; i < writable.size(); ++i) {
    if (layout.names[i] == nullptr) {
      writable[i] = state_[i];
    } else {
      writable[i] = {layout.names[i], own_copy(state_[i].buffer, backend)};
    }
  }
  return writable;
}

Change Slot::step(const PendingDecision& pending, Backend& backend) {
  if (rows_ != nullptr) return step_of_rows(pending, backend);
  const Decision& decision = pending.decision();
  const std::vector<Contribution> gradients = contributions(decision);
  if (gradients.empty()) return Change::kNone;

  const Hyper& hyper = pending.hyper(spec_);
  const StateLayout layout = state_layout(spec_.rule, hyper);
  make_zeros(backend);
  BufferRef target = destination(backend);
  std::array<State, kMaxStates> state = writable_state(layout, backend);
  SliceUpdate update = reduction(decision, gradients);
  update.rule = spec_.rule;
  update.hyper = &hyper;
  update.step = num_steps_ + 1;
  update.scale = pending.scale();
  const BufferRef base = bases_ ? base_of(decision) : BufferRef();
  if (base) {
    update.base = base->data();
    // Of what is to grow, the Hessian is that of what is to shrink with the other sign.
    const double strength = spec_.compensation;
    update.compensation = hyper.maximize ? -strength : strength;
  }
  update.value_in = value_->data();
  update.value_out = target->data();
  for (size_t i = 0; i < state.size(); ++i) {
    if (layout.names[i] == nullptr) continue;
    update.state[i] = state[i].buffer->data();
    if (!state_[i].buffer) update.state_is_new |= 1U << i;
  }
  backend.reduce_update(update);

  state_ = std::move(state);
  took_step(decision.number());
  return replace_value(std::move(target), backend);
}

void Slot::took_step(uint64_t decision) {
  ++num_steps_;
  version_ = std::max(decision, version_ + 1);
  since_ = decision;
}

size_t Slot::state_bytes() const {
  if (rows_ != nullptr) return state_[0].buffer ? row_policy_->counted_bytes() : 0;
  size_t total = 0;
  for (const State& state : state_) {
    if (state.buffer) total += spec_.num_bytes();
  }
  return total;
}

std::vector<std::pair<std::string, std::string>> Slot::dump(Backend& backend) const {
  std::vector<std::pair<std::string, std::string>> named;
  if (rows_ != nullptr) named.emplace_back("rows", dump_rows());
  if (value_) named.emplace_back("value", backend.bytes_of(value_, spec_.num_bytes()));
  const uint64_t num_bytes = rows_ != nullptr ? row_policy_->counted_bytes() : spec_.num_bytes();
  for (const State& state : state_) {
    if (state.buffer) named.emplace_back(state.name, backend.bytes_of(state.buffer, num_bytes));
  }
  for (size_t i = 0; bases_ && i < bases_->all().size(); ++i) {
    const auto& [life, base] = bases_->all()[i];
    if (!base) continue;
    named.emplace_back(
        "base of " + std::to_string(life.rank) + " in life " + std::to_string(life.incarnation),
        backend.bytes_of(base, num_bytes));
  }
  std::string step(sizeof num_steps_, '\0');
  std::memcpy(step.data(), &num_steps_, sizeof num_steps_);
  named.emplace_back("step", std::move(step));
  return named;
}

}  // namespace psstore
