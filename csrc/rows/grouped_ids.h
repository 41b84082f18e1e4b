// A client's ids in the order in which they travel: by partition, ascending within each, every id once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "rows/contribution.h"

namespace psstore {

// Partitions of a table are a power of two, at most so many: the highest bits of an id's hash.
inline constexpr int kMaxPartitionBits = 8;

class GroupedIds {
 public:
  // REQUIRES: fewer than 2^32 ids, partition_bits in [0, kMaxPartitionBits].
  GroupedIds(std::span<const uint64_t> ids, int partition_bits);

  size_t num_given() const { return places_.size(); }
  // Whether these were given, in this order.
  bool are(std::span<const uint64_t> ids) const;
  // Every id once.
  std::span<const uint64_t> ids() const { return ids_; }
  // (partitions + 1,): partition p has ids [begins[p], begins[p + 1]).
  std::span<const size_t> begins() const { return begins_; }

  // Bytes of the contributions to all partitions, one after the other (contribution.h), in that dtype.
  size_t packed_bytes(uint32_t dim, DType dtype) const {
    return ids_.size() * contributed_row_bytes(dim, dtype);
  }
  // Writes them. Gradients of an id that was given several times are summed in the order given, and then encoded.
  // `gradients`: (num_given, dim), `residuals`: (ids, dim) or null, as encode_rows() has them.
  void pack(const float* gradients, uint32_t dim, DType dtype, float* residuals,
            std::byte* packed) const;
  // Gives each id that was given its row, decoded.
  // `rows`: of each of the ids, in that dtype; `out`: (num_given, dim) of out_dtype, float32 or bfloat16
  void scatter(const std::byte* rows, uint32_t dim, DType dtype, DType out_dtype,
               std::byte* out) const;

 private:
  // `rows`: where each id's row is to be, float32 at any alignment.
  void sum(const float* gradients, uint32_t dim, std::span<std::byte* const> rows) const;

  std::vector<uint64_t> ids_;
  std::vector<size_t> begins_;
  std::vector<uint32_t> places_;  // in ids_, of each id that was given
};

}  // namespace psstore
