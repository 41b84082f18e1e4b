// Rows in fewer bytes: each by itself in the encoding of a slice of its size (kernels/codec.h), one after the other. So
// what becomes of a row does not depend on the rows that travel beside it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/types.h"

namespace psstore {

// What rows travel in: float32, half precision, or int8.
constexpr size_t encoded_row_bytes(DType dtype, uint32_t dim) {
  return encoded_bytes(dtype, dim);
}

// `rows`: (num_rows, dim). `residuals`: likewise, or null: is added first, and becomes what is lost; where that is not
// finite it stays. `encoded`: any alignment. REQUIRES: rows_travel_as(dtype).
void encode_rows(DType dtype, size_t num_rows, uint32_t dim, const float* rows, float* residuals,
                 std::byte* encoded);

// `rows`: (num_rows, dim). REQUIRES: rows_travel_as(dtype).
void decode_rows(DType dtype, size_t num_rows, uint32_t dim, const std::byte* encoded, float* rows);

// Whether all elements of the rows are. REQUIRES: rows_travel_as(dtype).
bool rows_are_finite(DType dtype, size_t num_rows, uint32_t dim, const std::byte* encoded);

}  // namespace psstore
