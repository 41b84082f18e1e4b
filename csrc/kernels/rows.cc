#include "kernels/rows.h"

#include "kernels/kernel_set.h"

namespace psstore {

void step_rows(const RowsUpdate& update, std::span<const RowToStep> rows) {
  best_kernels().step_rows(update, rows);
}

}  // namespace psstore
