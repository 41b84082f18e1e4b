// What a shard does with what is written to it: the part of shard.h that is about writes.
#include <algorithm>
#include <numeric>

#include "core/breakable_rules.h"
#include "kernels/codec.h"
#include "kernels/update.h"
#include "shard/entries.h"
#include "shard/shard.h"

namespace psstore {
namespace {

void check_payload(std::span<const SliceEntry> entries, const BufferRef& payload) {
  if (std::none_of(entries.begin(), entries.end(), is_admitted)) return;
  const uint64_t expected = sum_of_bytes(entries);
  const uint64_t present = payload ? payload->size() : 0;
  if (present != expected) {
    throw Error(ErrorCode::BAD_ARGUMENT, "the entries describe " + std::to_string(expected) +
                                             " payload bytes, the buffer has " +
                                             std::to_string(present));
  }
}

ErrorCode status_of(Staged outcome) {
  return outcome == Staged::kStale ? ErrorCode::STALE_INCARNATION : ErrorCode::OK;
}

}  // namespace

bool Shard::check(WriteKind kind, std::span<SliceEntry> entries, uint64_t payload_bytes) {
  if (sum_of_bytes(entries) != payload_bytes) {
    throw Error(ErrorCode::BAD_HEADER,
                "the slices add up to " + std::to_string(sum_of_bytes(entries)) +
                    " bytes, the header announces " + std::to_string(payload_bytes));
  }
  const SharedLock lock(table_.decision_mutex);
  for (SliceEntry& entry : entries) {
    const SlotSpec* spec = table_.spec_of(entry.key);
    entry.status = spec != nullptr ? check_write(*spec, kind, entry) : ErrorCode::UNKNOWN_KEY;
  }
  const bool may_write = std::any_of(entries.begin(), entries.end(), is_admitted);
  if (may_write) counters_.received_bytes.add(payload_bytes);
  return may_write;
}

void Shard::stage(const Origin& origin, std::span<SliceEntry> entries, const BufferRef& payload,
                  bool repeats) {
  check_payload(entries, payload);
  const SharedLock lock(table_.decision_mutex);
  Standing standing = ranks_.meet(origin);
  if (repeats && standing == Standing::kStale) standing = Standing::kOpen;
  switch (standing) {
    case Standing::kStale: refuse(entries, ErrorCode::STALE_INCARNATION); break;
    case Standing::kDecided: acknowledge(entries); break;
    case Standing::kPromised:
    case Standing::kMeasured:
    case Standing::kOpen: accept({WriteKind::kPush, origin, standing, payload}, entries); break;
  }
}

// Pushes that are under way are staged before, or find the seal.
void Shard::seal(const Origin& origin) {
  const ExclusiveLock lock(table_.decision_mutex);
  ranks_.seal(origin);
}

std::optional<double> Shard::staged_squares(const Origin& origin,
                                            std::vector<std::pair<uint64_t, uint64_t>> tensors) {
  // As a decision on it alone would reduce it.
  const Decision alone(1, false, 1.0, {{origin, 1.0F, std::move(tensors)}}, {});
  const SharedLock lock(table_.decision_mutex);
  const std::optional<std::vector<Sum>> sums = table_.staged_squares(alone);
  if (!sums) return std::nullopt;
  const Gathered gathered = backend_->gather_sums(*sums);
  if (gathered.ready) gathered.ready->wait();
  double total = 0;
  for (const Piece& piece : gathered.pieces) {
    const auto* squares = reinterpret_cast<const double*>(piece.buffer->data());
    total = std::accumulate(squares, squares + piece.num_bytes / sizeof(double), total);
  }
  return total;
}

void Shard::initialise(std::span<SliceEntry> entries, const BufferRef& payload) {
  check_payload(entries, payload);
  const SharedLock lock(table_.decision_mutex);
  accept({WriteKind::kInit, Origin{}, Standing::kOpen, payload}, entries);
}

void Shard::write(WriteKind kind, const std::string& client_name, uint64_t sequence,
                  std::span<SliceEntry> entries, const BufferRef& payload) {
  check_payload(entries, payload);
  const SharedLock lock(table_.decision_mutex);
  const std::shared_ptr<WriteWindow::Client> client = window_.client(client_name);
  const MutexLock client_lock(client->mutex);
  if (!client->take(sequence)) {
    answer_again(client->refusals, sequence, entries);
    return;
  }
  const Incoming incoming{kind, Origin{}, Standing::kOpen, payload};
  try {
    if (kind != WriteKind::kRestore) make_room(incoming, entries);
    accept(incoming, entries);
  } catch (...) {
    client->give_back(sequence);
    throw;
  }
  client->refusals.note(sequence, entries);
}

bool Shard::refuse_write(const std::string& client_name, uint64_t sequence,
                         std::span<SliceEntry> entries, ErrorCode status) {
  const SharedLock lock(table_.decision_mutex);
  const std::shared_ptr<WriteWindow::Client> client = window_.client(client_name);
  const MutexLock client_lock(client->mutex);
  if (!client->take(sequence)) {
    answer_again(client->refusals, sequence, entries);
    return false;
  }
  refuse(entries, status);
  client->refusals.note(sequence, entries);
  return true;
}

void Shard::answer_again(const Refusals& refusals, uint64_t sequence,
                         std::span<SliceEntry> entries) {
  if (holds(BreakableRule::kREFUSED_WRITES_STAY_REFUSED)) refusals.recall(sequence, entries);
  acknowledge(entries);
}

void Shard::make_room(const Incoming& incoming, std::span<const SliceEntry> entries) {
  std::vector<Key> made;
  size_t offset = 0;
  try {
    for (const SliceEntry& entry : entries) {
      const PayloadSlice slice{incoming.payload, offset, entry.num_bytes, entry.dtype};
      offset += entry.num_bytes;
      if (!is_admitted(entry)) continue;
      Stripe& stripe = table_.stripe_of(entry.key);
      const MutexLock lock(stripe.mutex);
      Slot* slot = table_.find(stripe, entry.key);
      if (slot == nullptr || check_write(slot->spec(), incoming.kind, entry) != ErrorCode::OK)
        continue;
      if (slot->make_room(slice, incoming.kind == WriteKind::kAdd, *backend_))
        made.push_back(entry.key);
    }
  } catch (const Error&) {
    for (const Key key : made) {
      Stripe& stripe = table_.stripe_of(key);
      const MutexLock lock(stripe.mutex);
      if (Slot* slot = table_.find(stripe, key)) slot->leave_room();
    }
    throw;
  }
}

void Shard::acknowledge(std::span<SliceEntry> entries) {
  for (SliceEntry& entry : entries) {
    entry.num_bytes = 0;
    if (!is_admitted(entry)) continue;
    Stripe& stripe = table_.stripe_of(entry.key);
    const MutexLock lock(stripe.mutex);
    const Slot* slot = table_.find(stripe, entry.key);
    if (slot != nullptr) entry.version = slot->part(entry.part).version;
    counters_.duplicates.add();
  }
}

void Shard::refuse(std::span<SliceEntry> entries, ErrorCode status) {
  for (SliceEntry& entry : entries) {
    if (is_admitted(entry)) entry.status = status;
    entry.num_bytes = 0;
    counters_.refused.add();
  }
}

void Shard::accept(const Incoming& incoming, std::span<SliceEntry> entries) {
  BufferRef resident;  // the payload where slots can use it, once one of them shall
  bool changed = false;
  size_t offset = 0;
  for (SliceEntry& entry : entries) {
    const size_t num_bytes = entry.num_bytes;
    if (is_admitted(entry)) {
      try {
        entry.status = accept_slice(incoming, entry, offset, resident);
      } catch (const Error& error) {
        if (!changed) throw;
        entry.status = error.code();
      } catch (const std::bad_alloc&) {
        if (!changed) throw;
        entry.status = ErrorCode::OUT_OF_MEMORY;
      }
      changed |= is_admitted(entry);
    }
    if (!is_admitted(entry)) counters_.refused.add();
    entry.num_bytes = 0;
    offset += num_bytes;
  }
  backend_->flush();
}

// What was admitted is checked again: the tensor may be gone since, and the admission is cheap.
ErrorCode Shard::accept_slice(const Incoming& incoming, SliceEntry& entry, size_t offset,
                              BufferRef& resident) {
  const BufferRef& payload = incoming.payload;
  const ErrorCode means = check_content(entry, payload ? payload->data() + offset : nullptr);
  if (means != ErrorCode::OK) return means;
  if (!resident && payload) resident = backend_->bring(payload);
  const PayloadSlice slice{resident, offset, entry.num_bytes, entry.dtype};
  Stripe& stripe = table_.stripe_of(entry.key);
  const MutexLock lock(stripe.mutex);
  Slot* slot = table_.find(stripe, entry.key);
  if (slot == nullptr) return ErrorCode::UNKNOWN_KEY;
  const ErrorCode fits = check_write(slot->spec(), incoming.kind, entry);
  if (fits != ErrorCode::OK) return fits;
  const ErrorCode status = change(incoming, entry, stripe, *slot, slice);
  entry.version = slot->part(entry.part).version;
  return status;
}

ErrorCode Shard::check_content(const SliceEntry& entry, const std::byte* bytes) {
  if (is_rows_encoding(entry.dtype)) return check_rows(entry, bytes);
  if (is_encoding(entry.dtype)) return check_encoded(entry, bytes);
  if (!options_.refuse_non_finite || dtype_bytes(entry.dtype) == 0) return ErrorCode::OK;
  const auto num_elems = static_cast<int64_t>(entry.num_bytes / dtype_bytes(entry.dtype));
  return all_finite(entry.dtype, bytes, num_elems) ? ErrorCode::OK : ErrorCode::NON_FINITE;
}

ErrorCode Shard::check_encoded(const SliceEntry& entry, const std::byte* bytes) {
  const SlotSpec* spec = table_.spec_of(entry.key);
  if (spec == nullptr) return ErrorCode::UNKNOWN_KEY;
  const Encoded encoded{entry.dtype, bytes, entry.num_bytes, spec->num_elems};
  if (!is_well_formed(encoded)) return ErrorCode::BAD_ARGUMENT;
  const bool may_be_applied = !options_.refuse_non_finite || all_finite(encoded);
  return may_be_applied ? ErrorCode::OK : ErrorCode::NON_FINITE;
}

ErrorCode Shard::check_rows(const SliceEntry& entry, const std::byte* bytes) {
  const SlotSpec* spec = table_.spec_of(entry.key);
  if (spec == nullptr) return ErrorCode::UNKNOWN_KEY;
  const uint32_t dim = spec->rows.dim;
  const RowContribution rows(bytes, entry.num_bytes, dim, entry.dtype, 1.0F);
  if (!rows.ascends()) return ErrorCode::BAD_ARGUMENT;
  if (!options_.refuse_non_finite) return ErrorCode::OK;
  const bool are_finite = rows_are_finite(rows.dtype(), rows.num_rows(), dim, rows.gradients());
  return are_finite ? ErrorCode::OK : ErrorCode::NON_FINITE;
}

ErrorCode Shard::change(const Incoming& incoming, const SliceEntry& entry, Stripe& stripe,
                        Slot& slot, const PayloadSlice& slice) {
  const bool held = !table_.bring_up_to_date(stripe, slot);
  switch (incoming.kind) {
    case WriteKind::kPush: return contribute(incoming, stripe, slot, slice);
    case WriteKind::kRestore: return held ? ErrorCode::NOT_APPLIED : restore(entry, slot, slice);
    case WriteKind::kInit:
      if (slot.initialised()) {
        counters_.duplicates.add();
      } else {
        slot.initialise(slice, *backend_);
        counters_.initialised.add();
      }
      return ErrorCode::OK;
    case WriteKind::kAssign:
      if (slot.spec().has_rows()) return held ? ErrorCode::NOT_APPLIED : assign_rows(slot, slice);
      counters_.count(slot.assign(slice, *backend_));
      counters_.writes.add();
      return ErrorCode::OK;
    case WriteKind::kAdd:
      if (!slot.initialised()) return ErrorCode::NOT_INITIALISED;
      counters_.count(slot.add(slice, *backend_));
      counters_.writes.add();
      return ErrorCode::OK;
  }
  return ErrorCode::INTERNAL;
}

ErrorCode Shard::contribute(const Incoming& incoming, Stripe& stripe, Slot& slot,
                            const PayloadSlice& slice) {
  // A decision that counts on it could not be carried out.
  if (!slot.initialised()) return ErrorCode::NOT_INITIALISED;
  const Origin* held_with = table_.held_with(stripe, slot, incoming.origin.rank);
  if (incoming.standing == Standing::kPromised) {
    const bool awaited = held_with != nullptr && slot.staging().find(*held_with) == nullptr;
    if (!awaited) {
      counters_.duplicates.add();
      return ErrorCode::OK;
    }
    slot.staging().put(
        {incoming.origin, slice});  // also in place of a later round's, which came out of turn
    counters_.pushes.add();
    table_.contributed(stripe, slot);
    return ErrorCode::OK;
  }
  if (held_with != nullptr) {
    return ErrorCode::ROUND_OUT_OF_ORDER;  // it would take the place of what the slot is held with
  }
  if (incoming.standing == Standing::kMeasured && slot.staging().find(incoming.origin) != nullptr) {
    counters_.duplicates.add();
    return ErrorCode::OK;
  }
  if (slot.spec().has_rows() && !slot.has_room_for(slice)) return ErrorCode::TABLE_FULL;
  const Staged outcome = slot.staging().offer({incoming.origin, slice});
  if (outcome == Staged::kTaken) counters_.pushes.add();
  if (outcome == Staged::kLate) counters_.duplicates.add();
  return status_of(outcome);
}

ErrorCode Shard::restore(const SliceEntry& entry, Slot& slot, const PayloadSlice& slice) {
  if (entry.part == 0) {
    table_.restoring(slot);
    restored_at_.store(version(), std::memory_order_relaxed);
    counters_.count(slot.restore_value(slice, version(), *backend_));
  } else {
    if (!slot.initialised()) return ErrorCode::NOT_INITIALISED;
    table_.restoring(slot);
    slot.restore_state(entry.part - 1U, slice, entry.version, *backend_);
  }
  counters_.writes.add();
  return ErrorCode::OK;
}

ErrorCode Shard::assign_rows(Slot& slot, const PayloadSlice& slice) {
  if (holds(BreakableRule::kASSIGNED_ROWS_END_HOLDS)) table_.restoring(slot);
  const std::optional<Change> change = slot.assign_rows(slice);
  if (!change) return ErrorCode::TABLE_FULL;
  counters_.count(*change);
  counters_.writes.add();
  return ErrorCode::OK;
}

}  // namespace psstore
