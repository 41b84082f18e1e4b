#include "rows/row_marks.h"

#include <random>
#include <utility>

#include "core/breakable_rules.h"

namespace psstore {
namespace {

uint64_t by_lot() {
  if (!holds(BreakableRule::kROW_MARKS_ARE_THEIR_OWN)) return 1;
  std::random_device random;
  uint64_t number = 0;
  while (number == 0) number = uint64_t{random()} << 32 | random();
  return number;
}

}  // namespace

RowMarks::RowMarks(size_t num_rows, std::shared_ptr<MemoryBudget> budget)
    : number_(by_lot()), marks_(num_rows, std::move(budget)) {}

}  // namespace psstore
