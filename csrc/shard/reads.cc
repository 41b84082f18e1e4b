// What a shard answers of its slices: the part of shard.h that is about reads.
#include <algorithm>
#include <utility>

#include "core/breakable_rules.h"
#include "kernels/codec.h"
#include "shard/entries.h"
#include "shard/shard.h"

namespace psstore {

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

ErrorCode Shard::note_base(const Life& worker, Slot& slot, Reply& reply) {
  try {
    if (slot.note_base(worker, *backend_)) reply.based.push_back(slot.spec().key);
  } catch (const Error& error) {
    return error.code();
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

}  // namespace psstore
