#include "shard.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>

#include "core/breakable_rules.h"
#include "core/huge_pages.h"
#include "kernels/codec.h"
#include "kernels/update.h"
#include "table/host_backend.h"

namespace psstore {
namespace {

// Rows that are read before they are encoded: so many of 64 elements stay in the first-level cache.
constexpr size_t kEncodedTogether = 64;

// Freed memory that the pool keeps beside what rounds needed lately: four payloads of the largest size, so that frames
// of other sizes touch no new pages either.
constexpr size_t kMaxIdleBytes = 256u << 20;
// Of slabs that were copied for somebody who has read them since, or whose rows were evicted.
constexpr size_t kMaxIdleRowBytes = 16u << 20;

bool is_admitted(const SliceEntry& entry) {
  return entry.status == ErrorCode::OK;
}

uint64_t sum_of_bytes(std::span<const SliceEntry> entries) {
  uint64_t sum = 0;
  for (const SliceEntry& entry : entries) sum += entry.num_bytes;
  return sum;
}

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

std::shared_ptr<Backend> backend_of(const ShardOptions& options) {
  if (options.backend) return options.backend;
  const auto budget = host_budget(options.max_memory_bytes);
  return std::make_shared<HostBackend>(
      BufferPool::create(kMaxIdleBytes, options.arena, budget), options.arena,
      BufferPool::create_over(kMaxIdleRowBytes, std::make_shared<HugePages>(), /*or_heap=*/true,
                              budget, kSlabBytes));
}

ErrorCode status_of(Staged outcome) {
  return outcome == Staged::kStale ? ErrorCode::STALE_INCARNATION : ErrorCode::OK;
}

// Takes the first of them away.
template <typename T>
std::span<T> take_first(std::span<T>& from, size_t count) {
  const std::span<T> first = from.first(count);
  from = from.subspan(count);
  return first;
}

// Values of rows in what they travel in; float32 is read to where it goes.
void read_encoded(const RowStore& rows, std::span<const uint64_t> ids, DType dtype, std::byte* to,
                  const RowSnapshot* then) {
  const RowShape& shape = rows.shape();
  if (dtype == shape.dtype) return rows.read(ids, to, then);
  const uint32_t dim = shape.dim;
  const size_t most = std::min(ids.size(), kEncodedTogether);
  std::vector<std::byte> values(most * shape.value_bytes());
  std::vector<float> floats(most * dim);
  while (!ids.empty()) {
    const size_t count = std::min(ids.size(), kEncodedTogether);
    rows.read(ids.first(count), values.data(), then);
    decode_rows(shape.dtype, count, dim, values.data(), floats.data());
    encode_rows(dtype, count, dim, floats.data(), nullptr, to);
    to += count * encoded_row_bytes(dtype, dim);
    ids = ids.subspan(count);
  }
}

Error gone(uint64_t at, Key key) {
  return {ErrorCode::VERSION_GONE, "version " + std::to_string(at) + " of slice " +
                                       std::to_string(key) +
                                       " is not kept any longer, or its tensor was dropped"};
}

std::map<std::string, uint64_t> told(const RowCounts& counts) {
  return {{"rows", counts.num_rows},
          {"row_bytes", counts.num_bytes},
          {"rows_evicted", counts.num_evicted},
          {"rows_refused", counts.num_refused}};
}

}  // namespace

Shard::Shard(const ShardOptions& options)
    : options_(options),
      backend_(backend_of(options)),
      changes_budget_(std::make_shared<MemoryBudget>(options.max_kept_bytes, "memory for readers",
                                                     "raise --snapshot-memory")),
      table_(options.num_stripes, backend_, counters_, ranks_, options.max_kept_bytes,
             options.notes_row_decisions ? changes_budget_ : nullptr) {
  if (options.num_stripes == 0) {
    throw Error(ErrorCode::BAD_ARGUMENT, "num_stripes is 0; a shard needs at least one");
  }
}

// ---- schema ---------------------------------------------------------------------------------------

void Shard::define(const TensorDefinition& definition) {
  definition.check();
  if (is_of_rows(definition.rule) && device() != "cpu") {
    throw Error(ErrorCode::BAD_ARGUMENT, "tensor " + std::to_string(definition.tensor_id) +
                                             " is a table of rows, and a shard on device '" +
                                             device() + "' can have none; use --device cpu");
  }
  if (definition.reduction.sorts() && device() != "cpu") {
    throw Error(ErrorCode::BAD_ARGUMENT,
                "tensor " + std::to_string(definition.tensor_id) +
                    " is to be sorted over workers, and a shard on device '" + device() +
                    "' can't; use --device cpu, or reduction 'mean'");
  }
  if (definition.compensation != 0 && device() != "cpu") {
    throw Error(ErrorCode::BAD_ARGUMENT,
                "tensor " + std::to_string(definition.tensor_id) +
                    " is to have its gradients compensated, and a shard on device '" + device() +
                    "' can't; use --device cpu, or compensation 0");
  }
  const ExclusiveLock lock(table_.decision_mutex);
  table_.define(definition);
  backend_->flush();
}

void Shard::drop(uint64_t tensor_id) {
  const ExclusiveLock lock(table_.decision_mutex);
  table_.drop(tensor_id);
  backend_->flush();
}

// ---- writes ---------------------------------------------------------------------------------------

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

BufferRef Shard::admit(WriteKind kind, std::span<SliceEntry> entries, uint64_t payload_bytes) {
  return check(kind, entries, payload_bytes) ? backend_->allocate_payload(payload_bytes)
                                             : BufferRef();
}

void Shard::stage(const Origin& origin, std::span<SliceEntry> entries, const BufferRef& payload) {
  check_payload(entries, payload);
  const SharedLock lock(table_.decision_mutex);
  const Standing standing = ranks_.meet(origin);
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

// ---- decisions ------------------------------------------------------------------------------------

void Shard::set_version(uint64_t version) {
  const ExclusiveLock lock(table_.decision_mutex);
  table_.set_version(version);
}

void Shard::advance(const Decision& decision) {
  if (decision.number() <= version()) return;
  const ExclusiveLock lock(table_.decision_mutex);
  if (table_.advance(decision)) {
    ranks_.record(decision);
    counters_.decisions.add();
    if (decision.skip()) counters_.skipped.add();
  }
  backend_->flush();
}

void Shard::set_scale(uint64_t number, std::optional<double> factor) {
  if (factor && !std::isfinite(*factor)) {
    throw Error(ErrorCode::BAD_ARGUMENT, "the scale of decision " + std::to_string(number) +
                                             " is not finite; without a factor it is a skip");
  }
  const ExclusiveLock lock(table_.decision_mutex);
  if (table_.set_scale(number, factor) && !factor) counters_.skipped.add();
}

bool Shard::settle(int64_t max_slots, int64_t max_bytes) {
  const SharedLock lock(table_.decision_mutex);
  const bool settled = table_.settle(max_slots, max_bytes);
  backend_->flush();
  return settled;
}

// ---- reads ----------------------------------------------------------------------------------------

Shard::Reply Shard::read(std::span<SliceEntry> entries, uint64_t max_payload_bytes,
                         ReadOptions options) {
  std::vector<Finding> findings;
  findings.reserve(entries.size());
  Reply reply;
  {
    const SharedLock lock(table_.decision_mutex);
    reply.version = version();
    for (SliceEntry& entry : entries) {
      entry.num_bytes = 0;
      entry.status = find(entry, options, findings, reply);
    }
    reply.restored = restored_at_.load(std::memory_order_relaxed) == reply.version;
  }
  counters_.pulls.add(entries.size());
  reply.payload_bytes = sum_of_bytes(entries);
  check_reply_bytes(reply.payload_bytes, max_payload_bytes);
  counters_.sent_bytes.add(reply.payload_bytes);
  const bool share = options.share && may_share(entries, reply.payload_bytes);
  Gathered gathered = share ? backend_->lend(findings) : backend_->gather(findings);
  reply.pieces = std::move(gathered.pieces);
  reply.ready = std::move(gathered.ready);
  reply.shared = share && locate(entries, reply.pieces);
  return reply;
}

void Shard::check_reply_bytes(uint64_t num_bytes, uint64_t max_bytes) {
  if (num_bytes <= max_bytes) return;
  throw Error(ErrorCode::FRAME_TOO_LARGE,
              "the slices asked for are " + std::to_string(num_bytes) + " bytes, one reply holds " +
                  std::to_string(max_bytes) + "; ask for fewer at a time");
}

Shard::Reply Shard::read_rows(std::span<SliceEntry> entries, WantedRows wanted,
                              uint64_t max_payload_bytes, ReadOptions options) {
  Reply reply;
  const SharedLock lock(table_.decision_mutex);
  uint64_t most_bytes = 0;
  for (const SliceEntry& entry : entries) {
    const SlotSpec* spec = table_.spec_of(entry.key);
    const DType dtype = dtype_of_changes(entry.dtype);
    if (spec != nullptr && rows_travel_as(dtype)) {
      most_bytes += entry.version * encoded_row_bytes(dtype, spec->rows.dim);
      if (is_of_changes(entry.dtype)) most_bytes += changed_rows_head_bytes(entry.version);
    }
  }
  check_reply_bytes(most_bytes, max_payload_bytes);
  const bool share = options.share && may_share(entries, most_bytes);
  Piece piece;
  if (most_bytes > 0) {
    piece.buffer = backend_->allocate(std::max<size_t>(most_bytes, share ? kLargeBlockBytes : 0));
  }
  reply.version = version();
  for (SliceEntry& entry : entries) {
    const std::span<const uint64_t> ids = take_first(wanted.ids, entry.version);
    KeptRows kept;
    if (is_of_changes(entry.dtype)) {
      kept = {take_first(wanted.marks, 1).front(), take_first(wanted.changes, entry.version)};
    }
    std::byte* const to = piece.buffer ? piece.buffer->data() + piece.num_bytes : nullptr;
    entry.num_bytes = 0;
    entry.status = write_rows(entry, ids, kept, options, to);
    piece.num_bytes += entry.num_bytes;
  }
  reply.payload_bytes = piece.num_bytes;
  counters_.pulls.add(entries.size());
  counters_.sent_bytes.add(reply.payload_bytes);
  if (piece.num_bytes > 0) reply.pieces.push_back(std::move(piece));
  reply.shared = share && !reply.pieces.empty() && locate(entries, reply.pieces);
  return reply;
}

ErrorCode Shard::write_rows(SliceEntry& entry, std::span<const uint64_t> ids, const KeptRows& kept,
                            const ReadOptions& options, std::byte* to) {
  Stripe& stripe = table_.stripe_of(entry.key);
  const MutexLock lock(stripe.mutex);
  Slot* slot = table_.find(stripe, entry.key);
  if (slot == nullptr) return ErrorCode::UNKNOWN_KEY;
  if (!slot->spec().has_rows()) return ErrorCode::RULE_MISMATCH;
  const DType dtype = dtype_of_changes(entry.dtype);
  if (!rows_travel_as(dtype)) return ErrorCode::DTYPE_MISMATCH;
  std::optional<RowSnapshot> then;
  if (options.at && holds(BreakableRule::kREADS_ARE_AS_OF_THEIR_DECISION)) {
    bool waits = false;
    then = table_.rows_at(stripe, *slot, *options.at, waits);
    if (!then) return waits ? ErrorCode::NOT_APPLIED : ErrorCode::VERSION_GONE;
  } else if (!table_.bring_up_to_date(stripe, *slot)) {
    return ErrorCode::NOT_APPLIED;
  }
  std::vector<uint64_t> coming;
  size_t head_bytes = 0;
  if (is_of_changes(entry.dtype)) {
    // Marks are of what is now.
    const RowMarks* const marks = then ? nullptr : slot->marks(changes_budget_);
    coming = begin_changed_rows(ids, kept, marks, to);
    head_bytes = changed_rows_head_bytes(ids.size());
    ids = coming;
  }
  read_encoded(slot->rows(), ids, dtype, to + head_bytes, then ? &*then : nullptr);
  entry.version = slot->version();
  entry.num_bytes = static_cast<uint32_t>(
      head_bytes + ids.size() * encoded_row_bytes(dtype, slot->spec().rows.dim));
  return ErrorCode::OK;
}

Shard::Reply Shard::list_rows(std::span<SliceEntry> entries, ReadOptions options) {
  Reply reply;
  const SharedLock lock(table_.decision_mutex);
  reply.version = version();
  for (SliceEntry& entry : entries) {
    const uint64_t left_bytes = kListedBytes - std::min(kListedBytes, reply.payload_bytes);
    Piece piece;
    entry.status = copy_rows(entry, options, left_bytes, piece);
    entry.num_bytes = static_cast<uint32_t>(piece.num_bytes);
    reply.payload_bytes += piece.num_bytes;
    if (piece.num_bytes > 0) reply.pieces.push_back(std::move(piece));
  }
  counters_.pulls.add(entries.size());
  counters_.sent_bytes.add(reply.payload_bytes);
  return reply;
}

ErrorCode Shard::copy_rows(SliceEntry& entry, const ReadOptions& options, uint64_t most_bytes,
                           Piece& piece) {
  Stripe& stripe = table_.stripe_of(entry.key);
  const MutexLock lock(stripe.mutex);
  Slot* slot = table_.find(stripe, entry.key);
  if (slot == nullptr) return ErrorCode::UNKNOWN_KEY;
  if (!slot->spec().has_rows() || entry.part > 1) return ErrorCode::RULE_MISMATCH;
  bool waits = false;
  const uint64_t at = options.at.value_or(version());
  const std::optional<RowSnapshot> then = table_.rows_at(stripe, *slot, at, waits);
  if (!then) return waits ? ErrorCode::NOT_APPLIED : ErrorCode::VERSION_GONE;

  const size_t row_bytes = entry.part == 0 ? kIdBytes : slot->spec().row_shape().record_bytes();
  const uint64_t first = std::min<uint64_t>(entry.version, then->num_rows);
  const uint64_t count = std::min(then->num_rows - first, most_bytes / row_bytes);
  entry.version = then->num_rows;
  if (count == 0) return ErrorCode::OK;
  piece = {backend_->allocate_payload(count * row_bytes), count * row_bytes};
  if (entry.part == 0) {
    slot->rows().copy_ids(*then, first, count, piece.buffer->data());
  } else {
    slot->rows().copy(*then, first, count, piece.buffer->data());
  }
  return ErrorCode::OK;
}

bool Shard::may_share(std::span<const SliceEntry> entries, uint64_t payload_bytes) const {
  const auto is_delta = [](const SliceEntry& entry) { return is_encoding(entry.dtype); };
  return payload_bytes >= kSharedReplyBytes &&
         (backend_->works_at_once() || std::ranges::none_of(entries, is_delta));
}

bool Shard::locate(std::span<SliceEntry> entries, std::span<const Piece> pieces) const {
  const auto in_arena = [this](const Piece& piece) {
    return backend_->offset_of(piece.buffer->data()).has_value();
  };
  if (!std::all_of(pieces.begin(), pieces.end(), in_arena)) return false;
  auto piece = pieces.begin();
  uint64_t begin = 0;  // within the piece
  for (SliceEntry& entry : entries) {
    if (entry.num_bytes == 0) continue;
    if (begin == piece->num_bytes) {
      ++piece;
      begin = 0;
    }
    entry.offset = *backend_->offset_of(piece->buffer->data()) + begin;
    begin += entry.num_bytes;
  }
  return true;
}

uint64_t Shard::hold(uint64_t id, bool state) {
  const ExclusiveLock lock(table_.decision_mutex);
  return table_.hold(id, state);
}

bool Shard::settle_hold(uint64_t id, uint64_t at) {
  {
    const SharedLock lock(table_.decision_mutex);
    if (table_.is_settled_hold(id, at)) return true;
  }
  const ExclusiveLock lock(table_.decision_mutex);
  return table_.settle_hold(id, at);
}

void Shard::release_hold(uint64_t id) {
  const ExclusiveLock lock(table_.decision_mutex);
  table_.release_hold(id);
}

void Shard::forget_changes() {
  const SharedLock lock(table_.decision_mutex);
  table_.forget_changes();
}

bool Shard::is_settled() {
  const ExclusiveLock lock(table_.decision_mutex);
  const bool settled = table_.is_settled();
  backend_->flush();
  return settled;
}

std::optional<std::vector<SlotCopy>> Shard::copies() {
  if (device() != "cpu") {
    throw Error(ErrorCode::BAD_ARGUMENT,
                "a shard on device '" + device() + "' can have no standby; use --device cpu");
  }
  const ExclusiveLock lock(table_.decision_mutex);
  return table_.copies();
}

void Shard::own_staged() {
  const SharedLock lock(table_.decision_mutex);
  table_.own_staged();
}

uint64_t Shard::take_copy(const SlotImage& image, std::optional<double> squares,
                          const BufferRef& payload, uint64_t offset) {
  const ExclusiveLock lock(table_.decision_mutex);
  std::array<BufferRef, 1 + kMaxStates> parts;
  uint64_t num_bytes = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    if ((image.parts >> i & 1) == 0) continue;
    const uint64_t part_bytes = table_.part_bytes(i, image);
    if (!payload || offset + num_bytes + part_bytes > payload->size()) {
      throw Error(ErrorCode::BAD_BODY, "body of FILL: its payload ends before slice " +
                                           std::to_string(image.key) + " does");
    }
    parts[i] = backend_->allocate_payload(part_bytes);
    std::memcpy(parts[i]->data(), payload->data() + offset + num_bytes, part_bytes);
    num_bytes += part_bytes;
  }
  table_.load(image, parts, squares);
  return num_bytes;
}

void Shard::note_bases(const Life& life, std::span<const SliceEntry> entries) {
  const SharedLock lock(table_.decision_mutex);
  for (const SliceEntry& entry : entries) table_.note_base(life, entry.key);
}

uint64_t Shard::take_base(const Life& life, Key key, const BufferRef& payload,
                          std::optional<uint64_t> offset) {
  const ExclusiveLock lock(table_.decision_mutex);
  const SlotSpec* spec = table_.spec_of(key);
  if (!offset || spec == nullptr) {
    table_.load_base(life, key, {});
    return 0;
  }
  if (!payload || *offset + spec->num_bytes() > payload->size()) {
    throw Error(ErrorCode::BAD_BODY, "body of FILL: its payload ends before a base of slice " +
                                         std::to_string(key) + " does");
  }
  BufferRef base = backend_->allocate_payload(spec->num_bytes());
  std::memcpy(base->data(), payload->data() + *offset, spec->num_bytes());
  table_.load_base(life, key, std::move(base));
  return spec->num_bytes();
}

Shard::History Shard::history() {
  const SharedLock lock(table_.decision_mutex);
  const auto& dropped = table_.dropped().ranges();
  return {.lives = ranks_.lives(),
          .writers = window_.all(),
          .dropped = {dropped.begin(), dropped.end()},
          .restored = restored_at_.load(std::memory_order_relaxed) == version()};
}

void Shard::resume(History history, const std::optional<Decision>& last) {
  const ExclusiveLock lock(table_.decision_mutex);
  ranks_.load(std::move(history.lives));
  if (holds(BreakableRule::kWINDOWS_ARE_FILLED_IN)) window_.load(history.writers);
  table_.load_dropped(history.dropped);
  if (history.restored) restored_at_.store(version(), std::memory_order_relaxed);
  if (last) table_.resume(*last);
}

std::vector<std::pair<std::string, Refusals>> Shard::refusals() {
  return window_.refusals();
}

void Shard::resume_refusals(const std::string& writer, Refusals refusals) {
  if (holds(BreakableRule::kREFUSALS_ARE_FILLED_IN)) {
    window_.load_refusals(writer, std::move(refusals));
  }
}

ErrorCode Shard::find_at(SliceEntry& entry, uint64_t at, Stripe& stripe, Slot& slot,
                         std::vector<Finding>& findings) {
  if (!slot.initialised()) return ErrorCode::NOT_INITIALISED;
  if (is_encoding(entry.dtype)) return ErrorCode::DTYPE_MISMATCH;
  bool waits = false;
  std::optional<Part> part = table_.part_at(stripe, slot, entry.part, at, waits);
  if (!part) return ErrorCode::VERSION_GONE;
  const uint64_t wanted_version = std::exchange(entry.version, part->version);
  if (waits) return ErrorCode::NOT_APPLIED;
  if (!part->buffer) return ErrorCode::NO_STATE;
  if (part->version < wanted_version) return ErrorCode::NOT_MODIFIED;
  add_finding(entry, wanted_version, slot, std::move(*part), findings);
  return ErrorCode::OK;
}

void Shard::add_finding(SliceEntry& entry, uint64_t wanted_version, Slot& slot, Part part,
                        std::vector<Finding>& findings) {
  const SlotSpec& spec = slot.spec();
  if (is_of_changes(entry.dtype)) {
    const DType dtype = dtype_of_changes(entry.dtype);
    // A device's bytes can't be looked at here.
    const bool is_known = backend_->works_at_once() && spec.num_elems > 0;
    findings.push_back(is_known
                           ? slot.changes(part, dtype, wanted_version, changes_budget_, *backend_)
                           : Finding(std::move(part.buffer), spec.dtype, dtype, spec.num_elems));
    entry.dtype = findings.back().is_changes ? changes_of(dtype) : dtype;
  } else {
    findings.emplace_back(std::move(part.buffer), spec.dtype, entry.dtype, spec.num_elems);
  }
  entry.num_bytes = static_cast<uint32_t>(findings.back().num_bytes);
}

ErrorCode Shard::find(SliceEntry& entry, const ReadOptions& options, std::vector<Finding>& findings,
                      Reply& reply) {
  Stripe& stripe = table_.stripe_of(entry.key);
  const MutexLock lock(stripe.mutex);
  Slot* slot = table_.find(stripe, entry.key);
  if (slot == nullptr) return ErrorCode::UNKNOWN_KEY;
  const SlotSpec& spec = slot->spec();
  const ErrorCode may = check_read(spec, entry);
  if (may != ErrorCode::OK) return may;
  const bool is_as_of = options.at && applies_by_decision(spec.rule) &&
                        holds(BreakableRule::kREADS_ARE_AS_OF_THEIR_DECISION);
  if (is_as_of) return find_at(entry, *options.at, stripe, *slot, findings);
  const bool held = !table_.bring_up_to_date(stripe, *slot);
  if (entry.part == 0) slot->make_zeros(*backend_);
  Part part = slot->part(entry.part);
  const uint64_t wanted_version = std::exchange(entry.version, part.version);
  // First of all: what it is held for may be a push that waits for the value.
  if (!part.buffer && entry.part == 0) return ErrorCode::NOT_INITIALISED;
  if (held) return ErrorCode::NOT_APPLIED;
  if (!part.buffer) return ErrorCode::NO_STATE;
  if (part.version < wanted_version) return ErrorCode::NOT_MODIFIED;
  if (entry.part == 0 && options.worker && slot->has_bases()) {
    const ErrorCode noted = note_base(*options.worker, *slot, reply);
    if (noted != ErrorCode::OK) return noted;
  }
  if (is_encoding(entry.dtype)) {
    Published::Answer answer =
        slot->follow(wanted_version, entry.dtype, options.whole, goes_on_, backend_);
    entry.dtype = answer.dtype;
    findings.emplace_back(std::move(answer.buffer), answer.dtype, answer.dtype, spec.num_elems);
    entry.num_bytes = static_cast<uint32_t>(findings.back().num_bytes);
  } else {
    add_finding(entry, wanted_version, *slot, std::move(part), findings);
  }
  return ErrorCode::OK;
}

ErrorCode Shard::note_base(const Life& worker, Slot& slot, Reply& reply) {
  try {
    if (slot.note_base(worker, *backend_)) reply.based.push_back(slot.spec().key);
  } catch (const Error& error) {
    return error.code();
  }
  return ErrorCode::OK;
}

std::optional<TableImage> Shard::image(uint64_t reader, uint64_t at) {
  settle(-1);  // not under the exclusive lock, which nobody trains beside
  std::optional<TableImage> image;
  {
    const ExclusiveLock lock(table_.decision_mutex);
    image = table_.image(reader, at);
  }
  if (image) std::ranges::sort(image->slots, {}, &SlotImage::key);
  return image;
}

Gathered Shard::read(const TableImage& image, std::span<const std::pair<Key, uint16_t>> wanted) {
  std::vector<Finding> findings;
  findings.reserve(wanted.size());
  {
    const SharedLock lock(table_.decision_mutex);
    for (const auto& [key, index] : wanted) {
      Stripe& stripe = table_.stripe_of(key);
      const MutexLock stripe_lock(stripe.mutex);
      Slot* slot = table_.find(stripe, key);
      std::optional<Part> part;
      uint64_t num_elems = 0;
      bool waits = false;
      const auto undecided = image.undecided.find(key);
      if (!table_.is_held(image)) throw gone(image.at, key);
      if (slot != nullptr && undecided != image.undecided.end()) {
        part = Part{undecided->second};
        num_elems = slot->spec().num_elems;
      } else if (slot != nullptr && slot->spec().has_rows()) {
        part = index == 0 ? records_at(stripe, *slot, image, waits)
                          : table_.part_at(stripe, *slot, index, image.at, waits);
        if (part) num_elems = part->buffer->size() / dtype_bytes(slot->spec().dtype);
      } else if (slot != nullptr) {
        part = table_.part_at(stripe, *slot, index, image.at, waits);
        num_elems = slot->spec().num_elems;
      }
      if (!part || !part->buffer || waits) {
        throw gone(image.at, key);
      }
      const SlotSpec& spec = slot->spec();
      findings.push_back({std::move(part->buffer), spec.dtype, spec.dtype, num_elems});
    }
  }
  return backend_->gather(findings);
}

uint64_t Shard::choose_changed(TableImage& image, Key key, uint64_t since) {
  const SharedLock lock(table_.decision_mutex);
  Stripe& stripe = table_.stripe_of(key);
  const MutexLock stripe_lock(stripe.mutex);
  Slot* const slot = table_.find(stripe, key);
  const bool has_rows = slot != nullptr && slot->spec().has_rows();
  bool waits = false;
  const std::optional<RowSnapshot> then = has_rows && table_.is_held(image)
                                              ? table_.rows_at(stripe, *slot, image.at, waits)
                                              : std::nullopt;
  if (!then) throw gone(image.at, key);
  std::vector<uint32_t> places = slot->changed_places(*then, since);
  return image.chosen.insert_or_assign(key, std::move(places)).first->second.size();
}

std::optional<Part> Shard::records_at(Stripe& stripe, Slot& slot, const TableImage& image,
                                      bool& waits) {
  const std::optional<RowSnapshot> then = table_.rows_at(stripe, slot, image.at, waits);
  if (!then) return std::nullopt;
  const size_t record_bytes = slot.spec().row_shape().record_bytes();
  const auto chosen = image.chosen.find(slot.spec().key);
  if (chosen == image.chosen.end()) {
    BufferRef records = backend_->allocate_payload(then->num_rows * record_bytes);
    slot.rows().copy(*then, 0, then->num_rows, records->data());
    return Part{std::move(records), slot.version()};
  }
  const std::vector<uint32_t>& places = chosen->second;
  if (!places.empty() && places.back() >= then->num_rows) return std::nullopt;
  const size_t id_bytes = then->num_rows * kIdBytes;
  BufferRef records = backend_->allocate_payload(id_bytes + places.size() * record_bytes);
  slot.rows().copy_ids(*then, 0, then->num_rows, records->data());
  slot.rows().copy(*then, places, records->data() + id_bytes);
  return Part{std::move(records), slot.version()};
}

void Shard::load(const SlotImage& image, std::span<const BufferRef> parts) {
  const ExclusiveLock lock(table_.decision_mutex);
  std::vector<BufferRef> brought;
  for (const BufferRef& part : parts) brought.push_back(part ? backend_->bring(part) : BufferRef());
  table_.load(image, brought);
  backend_->flush();
}

Shard::Reply Shard::norms(std::span<SliceEntry> entries) {
  std::vector<Sum> sums;
  const SharedLock lock(table_.decision_mutex);
  for (SliceEntry& entry : entries) {
    entry.dtype = DType::kFloat64;
    entry.status = find_squares(entry, sums);
    entry.num_bytes = entry.status == ErrorCode::OK ? sizeof(double) : 0;
  }
  Gathered gathered = backend_->gather_sums(sums);
  Reply reply;
  reply.pieces = std::move(gathered.pieces);
  reply.payload_bytes = sums.size() * sizeof(double);
  reply.version = version();
  reply.ready = std::move(gathered.ready);
  return reply;
}

ErrorCode Shard::find_squares(SliceEntry& entry, std::vector<Sum>& sums) {
  Stripe& stripe = table_.stripe_of(entry.key);
  const MutexLock lock(stripe.mutex);
  Slot* slot = table_.find(stripe, entry.key);
  if (slot == nullptr) return ErrorCode::UNKNOWN_KEY;
  entry.version = slot->version();
  std::optional<Sum> sum = table_.squares(stripe, *slot);
  if (!sum) return ErrorCode::NOT_MODIFIED;
  sums.push_back(std::move(*sum));
  return ErrorCode::OK;
}

std::vector<std::pair<std::string, std::string>> Shard::state(Key key) {
  const SharedLock lock(table_.decision_mutex);
  Stripe& stripe = table_.stripe_of(key);
  const MutexLock stripe_lock(stripe.mutex);
  Slot* slot = table_.find(stripe, key);
  if (slot == nullptr) {
    throw Error(ErrorCode::UNKNOWN_KEY, "there is no slice of key " + std::to_string(key) +
                                            " on shard " + std::to_string(options_.index));
  }
  table_.bring_up_to_date(stripe, *slot);
  slot->make_zeros(*backend_);
  return slot->dump(*backend_);
}

std::map<uint64_t, std::map<std::string, uint64_t>> Shard::row_stats() {
  const SharedLock lock(table_.decision_mutex);
  std::map<uint64_t, std::map<std::string, uint64_t>> by_table;
  for (const auto& [tensor_id, counts] : table_.row_counts()) by_table[tensor_id] = told(counts);
  return by_table;
}

std::map<std::string, uint64_t> Shard::stats() {
  TableSize size;
  RowCounts rows;
  {
    const SharedLock lock(table_.decision_mutex);
    size = table_.size();
    for (const auto& [tensor_id, counts] : table_.row_counts()) rows += counts;
  }
  std::map<std::string, uint64_t> found = told(rows);
  const MemoryBudget* const budget = backend_->budget();
  found.insert({
      {"version", version()},
      {"memory_bytes", budget != nullptr ? budget->taken_bytes() : backend_->pool_bytes()},
      {"max_memory_bytes", budget != nullptr ? budget->max_bytes() : kNoMemoryLimit},
      {"slots", size.num_slots},
      {"held_slots", size.num_held},
      {"value_bytes", size.value_bytes},
      {"state_bytes", size.state_bytes},
      {"staged_bytes", size.staged_bytes},
      {"published_bytes", size.published_bytes},
      {"base_bytes", size.base_bytes},
      {"holds", size.num_holds},
      {"kept_bytes", size.kept_bytes},
      {"pool_bytes", backend_->pool_bytes()},
      {"pool_idle_bytes", backend_->pool_idle_bytes()},
      {"pushes", counters_.pushes.value()},
      {"pulls", counters_.pulls.value()},
      {"writes", counters_.writes.value()},
      {"received_bytes", counters_.received_bytes.value()},
      {"sent_bytes", counters_.sent_bytes.value()},
      {"initialised", counters_.initialised.value()},
      {"duplicates", counters_.duplicates.value()},
      {"refused", counters_.refused.value()},
      {"decisions", counters_.decisions.value()},
      {"skipped", counters_.skipped.value()},
      {"missing", counters_.missing.value()},
      {"applied_in_place", counters_.applied_in_place.value()},
      {"applied_out_of_place", counters_.applied_out_of_place.value()},
  });
  return found;
}

}  // namespace psstore
