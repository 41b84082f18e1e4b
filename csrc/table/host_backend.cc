#include "table/host_backend.h"

#include <cstring>

namespace psstore {

// Memory that a client can write to, too, is not the pool's.
BufferRef HostBackend::keep(const BufferRef& payload, size_t offset, size_t num_bytes) {
  const bool is_worth_it =
      num_bytes >= kSharedValueBytes && num_bytes * kMaxSlicesPerKeptPayload >= payload->size();
  if (!is_worth_it || offset % kBufferAlignment != 0 || !pool_->owns(*payload)) return {};
  return part_of(payload, offset, num_bytes);
}

void HostBackend::copy(void* to, const void* from, size_t num_bytes) {
  if (num_bytes > 0) std::memcpy(to, from, num_bytes);
}

void HostBackend::convert(DType from, DType to, const void* source, void* destination,
                          int64_t num_elems) {
  psstore::convert(from, to, source, destination, num_elems);
}

void HostBackend::reduce_update(const SliceUpdate& update) {
  psstore::reduce_update(update);
}

Sum HostBackend::reduced_squares(const SliceUpdate& update) {
  return {psstore::reduced_squares(update), {}, 0};
}

Gathered HostBackend::gather(const std::vector<Finding>& findings) {
  return {psstore::gather(findings, *pool_), nullptr};
}

bool HostBackend::encode_change(const void* base, const ToEncode& what) {
  if (what.base != base) copy(what.base, base, static_cast<size_t>(what.num_elems) * sizeof(float));
  return psstore::encode_change(what);
}

// What is copied together, too, is in a large block.
Gathered HostBackend::lend(const std::vector<Finding>& findings) {
  return {psstore::gather(findings, *pool_, kLargeBlockBytes), nullptr};
}

std::optional<uint64_t> HostBackend::offset_of(const std::byte* data) const {
  return arena_ ? arena_->offset_of(data) : std::nullopt;
}

Gathered HostBackend::gather_sums(const std::vector<Sum>& sums) {
  if (sums.empty()) return {};
  Piece piece{pool_->allocate(sums.size() * sizeof(double)), sums.size() * sizeof(double)};
  std::byte* to = piece.buffer->data();
  for (const Sum& sum : sums) {
    std::memcpy(to, &sum.value, sizeof(double));
    to += sizeof(double);
  }
  return {{std::move(piece)}, nullptr};
}

std::string HostBackend::bytes_of(const BufferRef& buffer, size_t num_bytes) {
  return {reinterpret_cast<const char*>(buffer->data()), num_bytes};
}

}  // namespace psstore
