// Looks at payloads of encodings, and hands the work to the best kernels that the machine can run.
#include "kernels/codec.h"

#include <cmath>
#include <cstring>

#include "kernels/codec_elements.h"
#include "kernels/kernel_set.h"

namespace psstore {
namespace {

template <class T>
T element(const void* payload, uint64_t index) {
  T loaded;
  std::memcpy(&loaded, static_cast<const std::byte*>(payload) + index * sizeof(T), sizeof(T));
  return loaded;
}

bool indices_ascend(const Encoded& encoded) {
  const uint64_t num_kept = encoded.num_bytes / kTopKEntryBytes;
  uint64_t next = 0;  // the lowest that may come
  for (uint64_t i = 0; i < num_kept; ++i) {
    const auto index = element<uint32_t>(encoded.payload, i);
    if (index < next || index >= encoded.num_elems) return false;
    next = uint64_t{index} + 1;
  }
  return true;
}

bool scales_are_finite(const Encoded& encoded, float largest_code) {
  const uint64_t num_blocks = num_encoded_blocks(encoded.num_elems);
  for (uint64_t i = 0; i < num_blocks; ++i) {
    if (!std::isfinite(element<float>(encoded.payload, i) * largest_code)) return false;
  }
  return true;
}

bool values_are_finite(const Encoded& encoded) {
  const uint64_t num_kept = encoded.num_bytes / kTopKEntryBytes;
  const auto* values = static_cast<const std::byte*>(encoded.payload) + num_kept * sizeof(uint32_t);
  return all_finite(DType::kFloat32, values, static_cast<int64_t>(num_kept));
}

}  // namespace

void encode(const ToEncode& what) {
  best_kernels().encode(what);
}

bool encode_change(const ToEncode& what) {
  encode(what);
  const auto num_elems = static_cast<uint64_t>(what.num_elems);
  const uint64_t num_bytes = encoded_bytes(what.encoding, num_elems);
  if (all_finite({what.encoding, what.payload, num_bytes, num_elems})) return true;
  std::memcpy(what.base, what.source, num_elems * sizeof(float));
  return false;
}

void decode(const Encoded& encoded, void* destination) {
  best_kernels().decode(encoded, destination);
}

bool is_well_formed(const Encoded& encoded) {
  if (!is_encoded_size(encoded.encoding, encoded.num_elems, encoded.num_bytes)) return false;
  return encoded.encoding != DType::kTopK || indices_ascend(encoded);
}

bool all_finite(const Encoded& encoded) {
  if (encoded.encoding == DType::kTopK) return values_are_finite(encoded);
  return scales_are_finite(encoded, largest_code(encoded.encoding));
}

}  // namespace psstore
