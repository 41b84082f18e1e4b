// A contribution to the rows of a partition as it travels, and several of them merged.
//
//   | ids: n × u64, ascending | gradients: n rows of dim elements (row_codec.h) |      any alignment
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "kernels/update.h"
#include "rows/row_codec.h"
#include "rows/row_store.h"

namespace psstore {

// Bytes of a contribution to so many rows, and of a row in it.
constexpr size_t contributed_row_bytes(uint32_t dim, DType dtype = DType::kFloat32) {
  return kIdBytes + encoded_row_bytes(dtype, dim);
}

class RowContribution {
 public:
  // `encoding`: as it travels. REQUIRES: is_rows_encoding(), and `num_bytes` are whole rows.
  RowContribution(const std::byte* bytes, size_t num_bytes, uint32_t dim, DType encoding,
                  float weight)
      : bytes_(bytes),
        dtype_(dtype_of_rows(encoding)),
        num_rows_(num_bytes / contributed_row_bytes(dim, dtype_)),
        gradient_bytes_(encoded_row_bytes(dtype_, dim)),
        weight_(weight) {}

  size_t num_rows() const { return num_rows_; }
  DType dtype() const { return dtype_; }
  float weight() const { return weight_; }
  uint64_t id(size_t i) const {
    uint64_t id;
    std::memcpy(&id, bytes_ + i * kIdBytes, sizeof id);
    return id;
  }
  std::vector<uint64_t> ids() const {
    std::vector<uint64_t> all;
    add_ids(all);
    return all;
  }
  // Puts its ids behind those that are there.
  void add_ids(std::vector<uint64_t>& ids) const {
    ids.resize(ids.size() + num_rows_);
    if (num_rows_ > 0) std::memcpy(&ids[ids.size() - num_rows_], bytes_, num_rows_ * kIdBytes);
  }
  const std::byte* gradient(size_t i) const {
    return bytes_ + num_rows_ * kIdBytes + i * gradient_bytes_;
  }
  // Of all rows, one after the other.
  const std::byte* gradients() const { return gradient(0); }

  bool ascends() const {
    for (size_t i = 1; i < num_rows_; ++i) {
      if (id(i) <= id(i - 1)) return false;
    }
    return true;
  }

 private:
  const std::byte* bytes_;
  DType dtype_;
  size_t num_rows_;
  size_t gradient_bytes_;
  float weight_;
};

// The rows that several contributions are to, by ascending id, with their gradients in the order of the contributions.
// Who sends ids that do not ascend gets some rows more than once, and nothing worse.
struct MergedRows {
  std::vector<uint64_t> ids;
  std::vector<Contribution> gradients;
  std::vector<size_t> ends;  // of each id's gradients

  explicit MergedRows(std::span<const RowContribution> contributions);

  std::span<const Contribution> gradients_of(size_t i) const {
    const size_t begin = i == 0 ? 0 : ends[i - 1];
    return std::span(gradients).subspan(begin, ends[i] - begin);
  }
};

}  // namespace psstore
