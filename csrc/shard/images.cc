// What a shard writes to a checkpoint, and loads from one: the part of shard.h that is about images.
#include <algorithm>

#include "shard/shard.h"

namespace psstore {
namespace {

Error gone(uint64_t at, Key key) {
  return {ErrorCode::VERSION_GONE, "version " + std::to_string(at) + " of slice " +
                                       std::to_string(key) +
                                       " is not kept any longer, or its tensor was dropped"};
}

}  // namespace

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

}  // namespace psstore
