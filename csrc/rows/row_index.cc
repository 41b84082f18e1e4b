#include "rows/row_index.h"

#include <cstring>

namespace psstore::row_index {

Places::Places(size_t num_groups, const AllocateMemory& allocate)
    : memory_(allocate(num_groups * kGroupPlaces * (1 + sizeof(RowNumber)))),
      num_groups_(num_groups) {
  std::memset(memory_->data(), 0, num_groups * kGroupPlaces);
}

void Places::insert(uint64_t hash, RowNumber row) {
  size_t group = first_group(hash);
  uint32_t free = matches(tags(group), 0);
  while (free == 0) {
    group = (group + 1) & (num_groups_ - 1);
    free = matches(tags(group), 0);
  }
  const auto place = static_cast<size_t>(std::countr_zero(free));
  tags(group)[place] = tag_of(hash);
  rows(group)[place] = row;
  ++num_used_;
}

}  // namespace psstore::row_index
