// How a shard becomes another process's as well: the part of shard.h that is about standbys.
#include <array>
#include <cstring>

#include "core/breakable_rules.h"
#include "shard/shard.h"

namespace psstore {

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

}  // namespace psstore
