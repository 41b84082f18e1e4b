#include "rows/row_decisions.h"

#include <algorithm>
#include <new>

#include "core/errors.h"

namespace psstore {

void RowDecisions::begin(uint64_t decision, size_t num_rows) {
  const uint64_t number = decision - std::min(decision, from_);
  if (number > UINT32_MAX) return restart(decision);
  number_ = static_cast<uint32_t>(number);
  try {
    if (!marks_) marks_ = std::make_unique<HashedMarks>(num_rows, budget_);
    marks_->fit(num_rows);
  } catch (const Error&) {
  } catch (const std::bad_alloc&) {
  }
  if (!marks_) from_ = std::max(from_, decision);
}

}  // namespace psstore
