// What a shard answers of the rows of its tables: the part of shard.h that is about them.
#include <algorithm>

#include "core/breakable_rules.h"
#include "kernels/codec.h"
#include "shard/shard.h"

namespace psstore {
namespace {

// Rows that are read before they are encoded: so many of 64 elements stay in the first-level cache.
constexpr size_t kEncodedTogether = 64;

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

}  // namespace

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

}  // namespace psstore
