#include "rows/slabs.h"

#include <algorithm>
#include <bit>

namespace psstore {

SlabLayout::SlabLayout(size_t record_bytes)
    : record_bytes_(record_bytes),
      rows_per_slab_(std::max<size_t>(1, kSlabBytes / record_bytes_)),
      place_bits_(static_cast<int>(std::bit_width(rows_per_slab_ - 1))) {}

}  // namespace psstore
