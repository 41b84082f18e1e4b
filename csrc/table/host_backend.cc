#include "table/host_backend.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace psstore {

// Memory that a client can write to, too, is not the pool's.
BufferRef HostBackend::keep(const BufferRef& payload, size_t offset, size_t num_bytes) {
  const bool is_worth_it =
      num_bytes >= kSharedValueBytes && num_bytes * kMaxSlicesPerKeptPayload >= payload->size();
  if (!is_worth_it || offset % kBufferAlignment != 0 || !owns(payload)) return {};
  return part_of(payload, offset, num_bytes);
}

// ---- memory -----------------------------------------------------------------------------------------

BufferRef HostBackend::take(BufferPool& from, size_t num_bytes, uint64_t reserved_bytes) {
  try {
    return from.allocate(num_bytes, reserved_bytes);
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::OUT_OF_MEMORY,
                "the system has no " + in_mib(num_bytes) +
                    " left; lower --max-memory to what the host can spare, or use "
                    "more shards on more machines");
  }
}

// What the other pool keeps for reuse is in the way of nothing that the budget allows.
BufferRef HostBackend::allocate_rows(size_t num_bytes) {
  if (!rows_) return allocate(num_bytes);
  const MemoryBudget* const budget = pool_->budget();
  if (budget != nullptr && pool_->bytes_idle() > budget->left_bytes()) pool_->free_idle();
  return take(*rows_, num_bytes, 0);
}

BufferRef HostBackend::allocate_reserved(size_t num_bytes, uint64_t& reserved_bytes) {
  BufferRef memory = take(*pool_, num_bytes, reserved_bytes);
  reserved_bytes -= std::min(reserved_bytes, footprint(num_bytes));
  return memory;
}

void HostBackend::reserve(uint64_t num_bytes) {
  if (MemoryBudget* const budget = pool_->budget()) budget->take(num_bytes);
}

void HostBackend::unreserve(uint64_t num_bytes) {
  if (MemoryBudget* const budget = pool_->budget()) budget->give_back(num_bytes);
}

void HostBackend::draw(size_t num_bytes, uint64_t& reserved_bytes) {
  const uint64_t drawn = std::min(reserved_bytes, footprint(num_bytes));
  unreserve(drawn);
  reserved_bytes -= drawn;
}

// ---- work -------------------------------------------------------------------------------------------

void HostBackend::zero(void* memory, size_t num_bytes) {
  std::memset(memory, 0, num_bytes);
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
