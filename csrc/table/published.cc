#include "table/published.h"

#include <utility>

#include "kernels/codec.h"

namespace psstore {
namespace {

// Beyond the slot's own value: another one, and a delta.
uint64_t bytes_kept(const Backend& backend, uint64_t num_elems) {
  return backend.footprint(num_elems * sizeof(float)) +
         backend.footprint(encoded_bytes(DType::kInt8, num_elems));
}

// Of an encoding in blocks. Each takes as many bytes as the others, but for the last, which may take fewer.
bool says_all(DType encoding, const std::byte* payload, uint64_t num_bytes) {
  const uint64_t block_bytes = encoded_bytes(encoding, kEncodedBlockElems);
  const uint64_t num_blocks = (num_bytes + block_bytes - 1) / block_bytes;
  return all_finite({encoding, payload, num_bytes, num_blocks * kEncodedBlockElems});
}

}  // namespace

Published::Published(BufferRef value, uint64_t version, uint64_t num_elems, bool goes_on,
                     const std::shared_ptr<Backend>& backend)
    : reserved_(std::make_unique<Reservation>(backend, bytes_kept(*backend, num_elems))),
      value_(std::move(value)),
      version_(version),
      num_elems_(num_elems),
      elsewhere_(goes_on ? std::optional(version) : std::nullopt) {}

void Published::follow(const BufferRef& value, uint64_t version, DType encoding, Backend& backend) {
  if (version == version_) return;
  uint64_t& reserved = reserved_->left_bytes();
  BufferRef payload = backend.allocate_reserved(encoded_bytes(encoding, num_elems_), reserved);
  // The buffer itself if nobody else refers to it.
  BufferRef next =
      value_.unique() ? value_ : backend.allocate_reserved(num_elems_ * sizeof(float), reserved);
  const bool is_said =
      backend.encode_change(value_->data(), {.encoding = encoding,
                                             .source = value->data(),
                                             .base = next->data(),
                                             .num_elems = static_cast<int64_t>(num_elems_),
                                             .payload = payload->data()});
  delta_ = is_said ? Delta{std::move(payload), encoding, version_} : Delta{};
  value_ = std::move(next);
  version_ = version;
}

Published::Answer Published::answer(uint64_t wanted_version, DType encoding) const {
  const bool fits = delta_.payload && delta_.encoding == encoding && delta_.since != elsewhere_;
  if (fits && wanted_version == delta_.since + 1) return {delta_.payload, encoding};
  return whole();
}

size_t Published::num_bytes() const {
  const size_t delta_bytes = delta_.payload ? encoded_bytes(delta_.encoding, num_elems_) : 0;
  return num_elems_ * sizeof(float) + delta_bytes;
}

bool say_changes(std::span<const SliceEntry> entries, std::span<const std::byte> payload) {
  size_t begin = 0;
  for (const SliceEntry& entry : entries) {
    const bool is_delta = is_encoding(entry.dtype) && entry.num_bytes > 0;
    if (is_delta && !says_all(entry.dtype, payload.data() + begin, entry.num_bytes)) return false;
    begin += entry.num_bytes;
  }
  return true;
}

}  // namespace psstore
