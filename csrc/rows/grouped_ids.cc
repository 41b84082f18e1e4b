#include "rows/grouped_ids.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>

#include "core/breakable_rules.h"

namespace psstore {
namespace {

struct Given {
  uint64_t id;
  uint32_t position;  // in what was given
  uint32_t partition;
};

// Stable, by one byte of each: what is sorted by several is sorted by the least of them first (Knuth, TAOCP 3, 5.2.5).
// Ids of most tables are small, and bytes that are the same in all need no pass.
template <typename ByteOf>
void sort_by(std::vector<Given>& given, std::vector<Given>& room, ByteOf byte_of) {
  std::array<size_t, 257> begins{};
  for (const Given& one : given) ++begins[byte_of(one) + 1];
  if (std::ranges::find(begins, given.size()) != begins.end()) return;
  for (size_t i = 1; i < begins.size(); ++i) begins[i] += begins[i - 1];
  for (const Given& one : given) room[begins[byte_of(one)]++] = one;
  given.swap(room);
}

}  // namespace

GroupedIds::GroupedIds(std::span<const uint64_t> ids, int partition_bits)
    : begins_((size_t{1} << partition_bits) + 1), places_(ids.size()) {
  std::vector<Given> given(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    // Shifted twice: by 64 bits at once it is undefined.
    const auto partition = static_cast<uint32_t>(hash_of_id(ids[i]) >> 1 >> (63 - partition_bits));
    given[i] = {ids[i], static_cast<uint32_t>(i), partition};
  }
  std::vector<Given> room(given.size());
  for (int shift = 0; shift < 64; shift += 8) {
    sort_by(given, room, [=](const Given& one) { return size_t{one.id >> shift & 0xFF}; });
  }
  sort_by(given, room, [](const Given& one) { return size_t{one.partition}; });
  ids_.reserve(given.size());
  for (const Given& one : given) {
    const bool is_new = ids_.empty() || ids_.back() != one.id;
    if (is_new) {
      ids_.push_back(one.id);
      ++begins_[one.partition + 1];
    }
    places_[one.position] = static_cast<uint32_t>(ids_.size() - 1);
  }
  for (size_t p = 1; p < begins_.size(); ++p) begins_[p] += begins_[p - 1];
}

bool GroupedIds::are(std::span<const uint64_t> ids) const {
  if (ids.size() != places_.size()) return false;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids_[places_[i]] != ids[i]) return false;
  }
  return true;
}

void GroupedIds::sum(const float* gradients, uint32_t dim, std::span<std::byte* const> rows) const {
  std::vector<bool> is_there(ids_.size());
  const bool sums = holds(BreakableRule::kROWS_ARE_SUMMED);
  for (size_t i = 0; i < places_.size(); ++i) {
    const float* gradient = gradients + i * dim;
    std::byte* row = rows[places_[i]];
    if (!is_there[places_[i]]) {
      std::memcpy(row, gradient, dim * sizeof(float));
      is_there[places_[i]] = true;
      continue;
    }
    for (size_t k = 0; k < dim; ++k) {
      float sum;
      std::memcpy(&sum, row + k * sizeof sum, sizeof sum);
      if (sums) sum += gradient[k];
      std::memcpy(row + k * sizeof sum, &sum, sizeof sum);
    }
  }
}

// float32 is summed where it goes, and what is encoded aside.
void GroupedIds::pack(const float* gradients, uint32_t dim, DType dtype, float* residuals,
                      std::byte* packed) const {
  const bool is_encoded = dtype != DType::kFloat32;
  const size_t row_bytes = encoded_row_bytes(dtype, dim);
  const auto aside = std::make_unique_for_overwrite<float[]>(is_encoded ? ids_.size() * dim : 0);
  std::vector<std::byte*> rows(ids_.size());
  std::vector<std::byte*> encoded(begins_.size());  // of each partition's rows
  std::byte* to = packed;
  for (size_t p = 0; p + 1 < begins_.size(); ++p) {
    const size_t count = begins_[p + 1] - begins_[p];
    if (count == 0) continue;
    std::memcpy(to, &ids_[begins_[p]], count * kIdBytes);
    encoded[p] = to + count * kIdBytes;
    for (size_t i = 0; i < count; ++i) {
      const size_t row = begins_[p] + i;
      rows[row] =
          is_encoded ? reinterpret_cast<std::byte*>(&aside[row * dim]) : encoded[p] + i * row_bytes;
    }
    to = encoded[p] + count * row_bytes;
  }
  sum(gradients, dim, rows);
  for (size_t p = 0; is_encoded && p + 1 < begins_.size(); ++p) {
    const size_t begin = begins_[p];
    if (begins_[p + 1] == begin) continue;
    encode_rows(dtype, begins_[p + 1] - begin, dim, &aside[begin * dim],
                residuals != nullptr ? residuals + begin * dim : nullptr, encoded[p]);
  }
}

void GroupedIds::scatter(const std::byte* rows, uint32_t dim, DType dtype, DType out_dtype,
                         std::byte* out) const {
  const size_t row_bytes = encoded_row_bytes(dtype, dim);
  const size_t out_bytes = encoded_row_bytes(out_dtype, dim);
  std::vector<float> decoded(dim);
  for (size_t i = 0; i < places_.size(); ++i) {
    const std::byte* const from = rows + places_[i] * row_bytes;
    std::byte* const to = out + i * out_bytes;
    if (dtype == out_dtype) {
      std::memcpy(to, from, row_bytes);
      continue;
    }
    decode_rows(dtype, 1, dim, from, decoded.data());
    encode_rows(out_dtype, 1, dim, decoded.data(), nullptr, to);
  }
}

}  // namespace psstore
