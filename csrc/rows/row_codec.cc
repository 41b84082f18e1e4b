#include "rows/row_codec.h"

#include <cstring>

#include "kernels/codec.h"
#include "kernels/update.h"

namespace psstore {

void encode_rows(DType dtype, size_t num_rows, uint32_t dim, const float* rows, float* residuals,
                 std::byte* encoded) {
  const size_t row_bytes = encoded_row_bytes(dtype, dim);
  if (dtype == DType::kFloat32) {
    if (num_rows > 0) std::memcpy(encoded, rows, num_rows * row_bytes);
    return;
  }
  for (size_t i = 0; i < num_rows; ++i) {
    encode({.encoding = dtype,
            .source = rows + i * dim,
            .residual = residuals != nullptr ? residuals + i * dim : nullptr,
            .num_elems = dim,
            .payload = encoded + i * row_bytes});
  }
}

void decode_rows(DType dtype, size_t num_rows, uint32_t dim, const std::byte* encoded,
                 float* rows) {
  const size_t row_bytes = encoded_row_bytes(dtype, dim);
  if (dtype == DType::kFloat32) {
    if (num_rows > 0) std::memcpy(rows, encoded, num_rows * row_bytes);
    return;
  }
  if (!is_encoding(dtype)) {
    convert(dtype, DType::kFloat32, encoded, rows, static_cast<int64_t>(num_rows * dim));
    return;
  }
  for (size_t i = 0; i < num_rows; ++i) {
    decode({dtype, encoded + i * row_bytes, row_bytes, dim}, rows + i * dim);
  }
}

bool rows_are_finite(DType dtype, size_t num_rows, uint32_t dim, const std::byte* encoded) {
  if (!is_encoding(dtype)) {
    return all_finite(dtype, encoded, static_cast<int64_t>(num_rows * dim));
  }
  const size_t row_bytes = encoded_row_bytes(dtype, dim);
  for (size_t i = 0; i < num_rows; ++i) {
    if (!all_finite({dtype, encoded + i * row_bytes, row_bytes, dim})) return false;
  }
  return true;
}

}  // namespace psstore
