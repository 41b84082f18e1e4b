// What a slot does that is a partition of a table: the part of slot.h that is about rows.
#include <algorithm>
#include <cstring>
#include <utility>

#include "core/breakable_rules.h"
#include "rows/row_codec.h"
#include "table/slot.h"

namespace psstore {
namespace {

// Memory for so many rows is taken beside those of a partition without being needed: a part of them.
constexpr size_t kSpareRoomPart = 16;

}  // namespace

std::vector<RowContribution> Slot::row_contributions(const Decision& decision) const {
  std::vector<RowContribution> found;
  for (const Contribution& one : contributions(decision)) {
    found.emplace_back(static_cast<const std::byte*>(one.data), one.num_bytes, spec_.rows.dim,
                       one.dtype, one.weight);
  }
  return found;
}

uint64_t Slot::step_bytes_of_rows(const Decision& decision) const {
  uint64_t num_rows = 0;
  for (const RowContribution& one : row_contributions(decision)) num_rows += one.num_rows();
  return num_rows * spec_.row_shape().value_bytes();
}

// Who has room for all of them, as most decisions, need not look which of them are new: so there is room to spare where
// that is not much.
void Slot::reserve_rows(const Decision& decision, const Decision* before) {
  std::vector<RowContribution> all = row_contributions(decision);
  if (before != nullptr) {
    for (const RowContribution& one : row_contributions(*before)) all.push_back(one);
  }
  std::vector<uint64_t> ids;
  for (const RowContribution& one : all) one.add_ids(ids);
  const size_t most_new = row_policy_->most_new(rows_->num_rows());
  const bool is_bounded = spec_.rows.bounds.max_rows != 0;
  if (is_bounded || ids.size() <= rows_->num_rows() / kSpareRoomPart) {
    try {
      return rows_->reserve(ids, most_new);
    } catch (const Error& error) {
      if (is_bounded || error.code() != ErrorCode::OUT_OF_MEMORY) throw;
    }
  }
  if (rows_->has_room(ids)) return;
  const MergedRows merged(all);
  std::vector<RowNumber> rows(merged.ids.size());
  rows_->find(merged.ids, rows);
  rows_->reserve(new_ids(merged.ids, rows));
}

bool Slot::has_room_for(const PayloadSlice& contribution) const {
  const RowContribution given(contribution.data(), contribution.num_bytes, spec_.rows.dim,
                              contribution.dtype, 1.0F);
  if (row_policy_->has_room(rows_->num_rows(), given.num_rows())) return true;
  const std::vector<uint64_t> ids = given.ids();
  std::vector<RowNumber> rows(ids.size());
  rows_->find(ids, rows);
  return row_policy_->has_room(rows_->num_rows(),
                               static_cast<size_t>(std::ranges::count(rows, kNoRow)));
}

// All that can fail comes before the first row changes; rows that are evicted may go, and the rest fail, since they go
// as well when it is tried again.
Change Slot::step_of_rows(const PendingDecision& pending, Backend& backend) {
  const Decision& decision = pending.decision();
  if (!counted_here(decision)) return Change::kNone;
  const Hyper& hyper = pending.hyper(spec_);
  const MergedRows merged(row_contributions(decision));
  const std::vector<uint64_t>& ids = merged.ids;
  RowsToChange found{std::vector<RowNumber>(ids.size())};
  rows_->find(ids, found.rows);
  const BufferRef& counted = state_[0].buffer;
  row_policy_->admit(merged, found.rows, decision.number(), counted ? counted->data() : nullptr);
  begin_marks(decision.number(), ids.size());
  make_room(ids, found, row_policy_->make_room(*rows_, found.rows, decision.number()));
  count_rows(merged, found, backend);

  std::vector<RowToStep> steps;
  steps.reserve(ids.size());
  const bool has_sums = rows_->shape().sum_elems > 0;
  const float initial_sum = initial_row_sum(hyper);
  for (size_t i = 0; i < ids.size(); ++i) {
    if (found.rows[i] == kRefusedRow) continue;
    const RowNumber row = there_or_new(ids, i, found, initial_sum);
    if (has_sums && rows_->first_sum(row) == kSumToCome) rows_->begin_state(row, initial_sum);
    note_use(row, decision.number());
    if (marks_ && holds(BreakableRule::kSTEPPED_ROWS_ARE_MARKED)) mark(ids[i]);
    if (row_decisions_ && holds(BreakableRule::kSTEPPED_ROWS_ARE_NOTED)) {
      row_decisions_->mark(rows_->place_of(row));
    }
    steps.push_back({rows_->value(row), merged.gradients_of(i), ids[i]});
  }
  step_rows({.rule = spec_.rule,
             .hyper = &hyper,
             .step = num_steps_ + 1,
             .dim = spec_.rows.dim,
             .divisor = decision.divisor(),
             .scale = pending.scale(),
             .dtype = spec_.dtype,
             .lots = lots_of(decision)},
            steps);
  took_step(decision.number());
  return found.change;
}

void Slot::make_room_for_step_of_rows(const Decision& decision, Backend& backend) {
  reserve_rows(decision, nullptr);
  const MergedRows merged(row_contributions(decision));
  std::vector<RowNumber> rows(merged.ids.size());
  rows_->find(merged.ids, rows);
  for (const RowNumber row : rows) {
    if (row != kNoRow) rows_->make_writable(row);
  }
  if (state_[kCountedPart - 1].buffer) own_counted(backend);
}

std::optional<Change> Slot::assign_rows(const PayloadSlice& from) {
  const RowContribution given(from.data(), from.num_bytes, spec_.rows.dim, from.dtype, 1.0F);
  if (given.num_rows() == 0) return Change::kNone;
  const std::vector<uint64_t> ids = given.ids();
  RowsToChange found{std::vector<RowNumber>(ids.size())};
  rows_->find(ids, found.rows);
  const RowPolicy::Plan plan = row_policy_->make_room(*rows_, found.rows, settled_);
  if (plan.num_refused > 0) return std::nullopt;
  std::vector<float> value(spec_.rows.dim);
  // A checkpoint as of this decision may have been written before.
  begin_marks(settled_ + 1, ids.size());
  make_room(ids, found, plan);
  for (size_t i = 0; i < ids.size(); ++i) {
    const RowNumber row = there_or_new(ids, i, found, 0);
    decode_rows(given.dtype(), 1, spec_.rows.dim, given.gradient(i), value.data());
    convert(DType::kFloat32, spec_.dtype, value.data(), rows_->value(row), spec_.rows.dim);
    if (holds(BreakableRule::kASSIGNED_STATE_IS_NEW)) {
      rows_->begin_state(row, kSumToCome);
    }
    note_use(row, settled_);
    if (marks_ && holds(BreakableRule::kASSIGNED_ROWS_ARE_MARKED)) mark(ids[i]);
    if (row_decisions_ && holds(BreakableRule::kASSIGNED_ROWS_ARE_NOTED)) {
      row_decisions_->mark(rows_->place_of(row));
    }
  }
  version_ = std::max(version_, settled_) + 1;
  since_ = settled_;
  return found.change;
}

void Slot::make_room(std::span<const uint64_t> ids, RowsToChange& found,
                     const RowPolicy::Plan& plan) {
  if (!plan.victims.empty()) {
    if (marks_ && holds(BreakableRule::kEVICTED_ROWS_ARE_MARKED)) {
      for (const size_t place : plan.victims) mark(rows_->id_of(rows_->number(place)));
    }
    const std::vector<MovedRow> moved = rows_->evict(plan.victims);
    if (row_decisions_ && holds(BreakableRule::kNOTES_MOVE_WITH_ROWS)) {
      for (const MovedRow& row : moved) row_decisions_->move(row.from, row.to);
    }
    for (size_t i = 0; i < ids.size(); ++i) {
      if (found.rows[i] < kRefusedRow) rows_->find(ids.subspan(i, 1), {&found.rows[i], 1});
    }
  }
  row_policy_->made_room(plan);
  rows_->reserve(new_ids(ids, found.rows));
  for (const RowNumber row : found.rows) {
    if (row < kRefusedRow && rows_->make_writable(row)) found.change = Change::kOutOfPlace;
  }
}

void Slot::count_rows(const MergedRows& merged, const RowsToChange& found, Backend& backend) {
  own_counted(backend);
  const BufferRef& counted = state_[kCountedPart - 1].buffer;
  row_policy_->count(merged, found.rows, counted ? counted->data() : nullptr);
}

// It is copied if somebody reads it, as rule state is.
void Slot::own_counted(Backend& backend) {
  State& counted = state_[kCountedPart - 1];
  const size_t num_bytes = row_policy_->counted_bytes();
  if (num_bytes == 0 || (counted.buffer && counted.buffer.unique())) return;
  BufferRef own = counted.buffer ? backend.allocate(num_bytes)
                                 : backend.allocate_reserved(num_bytes, reserved_bytes_);
  if (counted.buffer) {
    backend.copy(own->data(), counted.buffer->data(), num_bytes);
  } else {
    backend.zero(own->data(), num_bytes);
  }
  counted = {"counted", std::move(own)};
}

RowNumber Slot::there_or_new(std::span<const uint64_t> ids, size_t i, RowsToChange& found,
                             float initial_sum) {
  RowNumber& row = found.rows[i];
  // Of ids that do not ascend, as memory that a client shares may say, one may have come before.
  if (row == kNoRow && ids[i] <= found.highest) rows_->find({&ids[i], 1}, {&row, 1});
  found.highest = std::max(found.highest, ids[i]);
  if (row == kNoRow) row = rows_->add(ids[i], initial_sum);
  return row;
}

void Slot::begin_marks(uint64_t decision, size_t most_new) {
  if (marks_ && !marks_->go_on()) marks_ = nullptr;
  if (row_decisions_) row_decisions_->begin(decision, rows_->num_rows() + most_new);
}

const RowMarks* Slot::marks(const std::shared_ptr<MemoryBudget>& budget) {
  try {
    if (!marks_) marks_ = std::make_unique<RowMarks>(rows_->num_rows(), budget);
    marks_->fit(rows_->num_rows());
  } catch (const Error&) {
  } catch (const std::bad_alloc&) {
  }
  return marks_.get();
}

void Slot::note_use(RowNumber row, uint64_t decision) {
  if (!spec_.rows.bounds.evicts()) return;
  rows_->set_usage(row, row_policy_->used(rows_->usage(row), decision));
}

RoundingLots Slot::lots_of(const Decision& decision) const {
  const bool by_decision = holds(BreakableRule::kROUNDING_IS_BY_DECISION);
  return {lots_key(spec_.rows.first_values.seed),
          by_decision ? decision.number() : static_cast<uint64_t>(num_steps_)};
}

bool Slot::counted_here(const Decision& decision) const {
  return !contributions(decision).empty();
}

// Row by row in the order of their ids: the same sum whatever else is in the partition.
double Slot::squares_of_rows(const Decision& decision) const {
  const MergedRows merged(row_contributions(decision));
  SliceUpdate row;
  row.num_elems = spec_.rows.dim;
  row.divisor = decision.divisor();
  double sum = 0;
  for (size_t i = 0; i < merged.ids.size(); ++i) {
    row.contributions = merged.gradients_of(i);
    sum += reduced_squares(row);
  }
  return sum;
}

std::optional<RowSnapshot> Slot::rows_at(uint64_t at) const {
  if (since_ <= at) return rows_->snapshot();
  for (const KeptParts& kept : kept_) {
    if (kept.from <= at && at <= kept.to) return kept.rows;
  }
  return std::nullopt;
}

// By places as they are now: what is known of a place never becomes less, whichever rows have gone since.
std::vector<uint32_t> Slot::changed_places(const RowSnapshot& then, uint64_t since) const {
  std::vector<uint32_t> places;
  for (uint32_t place = 0; place < then.num_rows; ++place) {
    if (!row_decisions_ || row_decisions_->may_have_changed(place, since)) places.push_back(place);
  }
  return places;
}

std::optional<SlotImage> Slot::image_of_rows(uint64_t at) const {
  const auto parts = [](uint64_t num_rows, const BufferRef& counted) {
    return SlotImage::parts_of_rows(num_rows, counted && holds(BreakableRule::kCOUNTS_ARE_WRITTEN));
  };
  if (since_ <= at) {
    return SlotImage{spec_.key, version_, static_cast<uint64_t>(num_steps_),
                     parts(rows_->num_rows(), state_[0].buffer)};
  }
  for (const KeptParts& kept : kept_) {
    if (at < kept.from || kept.to < at || !kept.state) continue;
    return SlotImage{spec_.key, kept.version, kept.num_steps,
                     parts(kept.rows.num_rows, kept.parts[kCountedPart])};
  }
  return std::nullopt;
}

uint64_t Slot::part_bytes(size_t part, const SlotImage& image) const {
  if (rows_ == nullptr) return spec_.num_bytes();
  if (part == kCountedPart) return row_policy_->counted_bytes();
  return image.num_rows() * spec_.row_shape().record_bytes();
}

RowCounts Slot::row_counts() const {
  return {rows_->num_rows(), rows_->num_bytes(), row_policy_->num_evicted(),
          row_policy_->num_refused()};
}

std::string Slot::dump_rows() const {
  std::string records(rows_->num_bytes(), '\0');
  rows_->copy(rows_->snapshot(), 0, rows_->num_rows(),
              reinterpret_cast<std::byte*>(records.data()));
  return records;
}

void Slot::load_rows(const SlotImage& image, std::span<const BufferRef> parts, Backend& backend) {
  if (parts.size() > kCountedPart && parts[kCountedPart]) {
    const size_t num_bytes = row_policy_->counted_bytes();
    state_[kCountedPart - 1] = {"counted", backend.allocate_reserved(num_bytes, reserved_bytes_)};
    backend.copy(state_[kCountedPart - 1].buffer->data(), parts[kCountedPart]->data(), num_bytes);
  }
  marks_ = nullptr;
  if (row_decisions_) row_decisions_->restart(std::max(settled_, image.version));
  if (!parts.empty() && parts[0]) {
    rows_->load({parts[0]->data(), part_bytes(0, image)});
  }
}

void Slot::copy_rows_to(std::vector<SlotCopy>& copies, SlotCopy whole, Backend& backend) const {
  const RowSnapshot all = rows_->snapshot();
  const size_t record_bytes = spec_.row_shape().record_bytes();
  const size_t most = std::max<size_t>(1, kCopiedRowsBytes / record_bytes);
  SlotCopy counted;
  counted.image = whole.image;
  counted.image.parts = SlotImage::kCounted;
  counted.parts[kCountedPart] = std::exchange(whole.parts[kCountedPart], {});
  counted.part_bytes = row_policy_->counted_bytes();
  size_t first = 0;
  do {
    const size_t count = std::min(most, all.num_rows - first);
    SlotCopy copy = std::move(whole);
    whole = {};
    whole.image = copy.image;
    copy.image.parts = SlotImage::parts_of_rows(count);
    copy.part_bytes = count * record_bytes;
    if (count > 0) {
      copy.parts[0] = backend.allocate_payload(copy.part_bytes);
      rows_->copy(all, first, count, copy.parts[0]->data());
    }
    copies.push_back(std::move(copy));
    first += count;
  } while (first < all.num_rows);
  if (counted.parts[kCountedPart] && holds(BreakableRule::kCOUNTS_ARE_FILLED_IN)) {
    copies.push_back(std::move(counted));
  }
}

}  // namespace psstore
