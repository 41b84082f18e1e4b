#include "table/published.h"

#include <cstring>
#include <utility>

#include "kernels/codec.h"

namespace psstore {
namespace {

// What a delta may be added to: the buffer itself if nobody else refers to it, else a copy.
BufferRef own_or_copy(const BufferRef& buffer, size_t num_bytes, Backend& backend) {
  if (buffer.unique()) return buffer;
  BufferRef copy = backend.allocate(num_bytes);
  if (num_bytes > 0) std::memcpy(copy->data(), buffer->data(), num_bytes);
  return copy;
}

}  // namespace

Published::Published(BufferRef value, uint64_t version, uint64_t num_elems)
    : value_(std::move(value)), version_(version), num_elems_(num_elems) {}

void Published::follow(const BufferRef& value, uint64_t version, DType encoding, Backend& backend) {
  if (version == version_) return;
  const uint64_t num_bytes = encoded_bytes(encoding, num_elems_);
  BufferRef payload = backend.allocate(num_bytes);
  BufferRef next = own_or_copy(value_, num_elems_ * sizeof(float), backend);
  encode({.encoding = encoding,
          .source = value->data(),
          .base = next->data(),
          .num_elems = static_cast<int64_t>(num_elems_),
          .payload = payload->data()});
  if (all_finite({encoding, payload->data(), num_bytes, num_elems_})) {
    value_ = std::move(next);
    delta_ = {std::move(payload), encoding, version_};
  } else {
    value_ = value;
    delta_ = {};
  }
  version_ = version;
}

Published::Answer Published::answer(uint64_t wanted_version, DType encoding) const {
  const bool fits = delta_.payload && delta_.encoding == encoding;
  if (fits && wanted_version == delta_.since + 1) return {delta_.payload, encoding};
  return {value_, DType::kFloat32};
}

size_t Published::num_bytes() const {
  const size_t delta_bytes = delta_.payload ? encoded_bytes(delta_.encoding, num_elems_) : 0;
  return num_elems_ * sizeof(float) + delta_bytes;
}

}  // namespace psstore
