// What a slot does that is a partition of a table: the part of slot.h that is about rows.
#include <algorithm>
#include <cstring>
#include <utility>

#include "table/slot.h"

namespace psstore {

std::vector<RowContribution> Slot::row_contributions(const Decision& decision) const {
  std::vector<RowContribution> found;
  for (const Contribution& one : contributions(decision)) {
    found.emplace_back(static_cast<const std::byte*>(one.data), one.num_bytes, spec_.rows.dim,
                       one.weight);
  }
  return found;
}

// Who has room for all of them, as most decisions, need not look which of them are new.
void Slot::reserve_rows(const Decision& decision) {
  const std::vector<RowContribution> all = row_contributions(decision);
  size_t most = 0;
  for (const RowContribution& one : all) most += one.num_rows();
  if (rows_->has_room(most)) return;
  const MergedRows merged(all);
  std::vector<RowNumber> rows(merged.ids.size());
  rows_->find(merged.ids, rows);
  rows_->reserve(static_cast<size_t>(std::ranges::count(rows, kNoRow)));
}

// All that can fail comes before the first row changes.
Change Slot::step_of_rows(const PendingDecision& pending) {
  const Decision& decision = pending.decision();
  if (!counted_here(decision)) return Change::kNone;
  const Hyper& hyper = pending.hyper(spec_);
  const MergedRows merged(row_contributions(decision));
  const std::vector<uint64_t>& ids = merged.ids;
  RowsToChange rows = rows_to_change(ids);
  std::vector<RowToStep> steps(ids.size());

  const bool sums = sums_squares(spec_.rule);
  const float initial_state = initial_row_state(spec_.rule, hyper);
  for (size_t i = 0; i < ids.size(); ++i) {
    const RowNumber row = there_or_new(ids, i, rows, initial_state);
    if (sums && rows_->first_state(row) == kStateToCome) rows_->fill_state(row, initial_state);
    steps[i] = {rows_->value(row), merged.gradients_of(i)};
  }
  step_rows({.rule = spec_.rule,
             .hyper = &hyper,
             .step = num_steps_ + 1,
             .dim = spec_.rows.dim,
             .divisor = decision.divisor(),
             .scale = pending.scale()},
            steps);
  took_step(decision.number());
  return rows.change;
}

Change Slot::assign_rows(const PayloadSlice& from) {
  const RowContribution given(from.data(), from.num_bytes, spec_.rows.dim, 1.0F);
  if (given.num_rows() == 0) return Change::kNone;
  std::vector<uint64_t> ids(given.num_rows());
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = given.id(i);
  RowsToChange rows = rows_to_change(ids);
  for (size_t i = 0; i < ids.size(); ++i) {
    const RowNumber row = there_or_new(ids, i, rows, 0);
    std::memcpy(rows_->value(row), given.gradient(i), spec_.row_shape().value_bytes());
    rows_->fill_state(row, assigned_row_state(spec_.rule));
  }
  version_ = std::max(version_, settled_) + 1;
  since_ = settled_;
  return rows.change;
}

// All that can fail.
Slot::RowsToChange Slot::rows_to_change(std::span<const uint64_t> ids) {
  RowsToChange found{std::vector<RowNumber>(ids.size()), Change::kInPlace};
  rows_->find(ids, found.rows);
  rows_->reserve(static_cast<size_t>(std::ranges::count(found.rows, kNoRow)));
  for (const RowNumber row : found.rows) {
    if (row != kNoRow && rows_->make_writable(row)) found.change = Change::kOutOfPlace;
  }
  return found;
}

RowNumber Slot::there_or_new(std::span<const uint64_t> ids, size_t i, RowsToChange& found,
                             float initial_state) {
  RowNumber& row = found.rows[i];
  // Of ids that do not ascend, as memory that a client shares may say, one may have come just before.
  if (row == kNoRow && i > 0 && ids[i] <= ids[i - 1]) rows_->find({&ids[i], 1}, {&row, 1});
  if (row == kNoRow) row = rows_->add(ids[i], initial_state);
  return row;
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

std::optional<SlotImage> Slot::image_of_rows(uint64_t at) const {
  if (since_ <= at) {
    return SlotImage{spec_.key, version_, static_cast<uint64_t>(num_steps_),
                     SlotImage::parts_of_rows(rows_->num_rows())};
  }
  for (const KeptParts& kept : kept_) {
    if (at < kept.from || kept.to < at || !kept.state) continue;
    return SlotImage{spec_.key, kept.version, kept.num_steps,
                     SlotImage::parts_of_rows(kept.rows.num_rows)};
  }
  return std::nullopt;
}

void Slot::copy_rows_to(std::vector<SlotCopy>& copies, SlotCopy whole, Backend& backend) const {
  const RowSnapshot all = rows_->snapshot();
  const size_t record_bytes = spec_.row_shape().record_bytes();
  const size_t most = std::max<size_t>(1, kCopiedRowsBytes / record_bytes);
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
}

}  // namespace psstore
