#include "rows/row_residuals.h"

#include <cstring>
#include <string>
#include <vector>

#include "core/errors.h"

namespace psstore {

RowResiduals::RowResiduals(uint32_t dim, size_t max_rows) : rows_(dim, 0, max_rows) {}

void RowResiduals::read(std::span<const uint64_t> ids, float* residuals) const {
  rows_.store().read(ids, reinterpret_cast<std::byte*>(residuals));
}

void RowResiduals::write(std::span<const uint64_t> ids, const float* residuals) {
  const std::vector<RowNumber> rows = rows_.rows_for(ids);
  for (size_t i = 0; i < ids.size(); ++i) {
    if (rows[i] == kRefusedRow) continue;
    std::memcpy(rows_.value(rows[i]), residuals + i * dim(), dim() * sizeof(float));
  }
}

void RowResiduals::copy(uint64_t* ids, float* residuals, uint32_t* ages) const {
  const RowStore& store = rows_.store();
  for (size_t i = 0; i < num_rows(); ++i) {
    const RowNumber row = store.number(i);
    ids[i] = store.id_of(row);
    std::memcpy(residuals + i * dim(), store.record(row) + kIdBytes, dim() * sizeof(float));
    ages[i] = rows_.age(row);
  }
}

void RowResiduals::load(std::span<const uint64_t> ids, const float* residuals,
                        const uint32_t* ages) {
  if (ids.size() > rows_.max_rows()) {
    throw Error(ErrorCode::BAD_ARGUMENT, "residuals of " + std::to_string(ids.size()) +
                                             " rows; expected at most " +
                                             std::to_string(rows_.max_rows()));
  }
  for (size_t i = 0; i < ids.size(); ++i) {
    RowNumber row = kNoRow;
    rows_.store().find(ids.subspan(i, 1), {&row, 1});
    if (row != kNoRow) {
      throw Error(ErrorCode::BAD_ARGUMENT,
                  "residuals have id " + std::to_string(ids[i]) + " twice");
    }
    row = rows_.load(ids[i], ages[i]);
    std::memcpy(rows_.value(row), residuals + i * dim(), dim() * sizeof(float));
  }
}

}  // namespace psstore
