// A batch of updates made launches and a table of descriptors: all that the host does for a batch.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/batch_cuda.h"
#include "kernels/gpu/batch.h"
#include "kernels/gpu/variants.h"

namespace psstore::gpu {

// The slices of one variant. Offsets are those of their parts of the table, in bytes.
struct Launch {
  int64_t num_slices = 0;
  int64_t num_sources = 0;
  Grid grid;
  uint64_t slices = 0;
  uint64_t sources = 0;
  uint64_t first_slices = 0;
};

enum class Purpose : uint8_t { kUpdate, kSquares };

// What a batch needs.
class Plan {
 public:
  // Refers to the batch. `max_blocks`: of each launch. Throws Error(INTERNAL) for an update that breaks what update.h
  // requires.
  Plan(Purpose purpose, std::span<const SliceUpdate> batch, int64_t max_blocks = kMaxBlocks);

  uint64_t num_bytes() const { return steps_ + num_steps_ * sizeof(StepBytes); }

  // The table, to `table`; of num_bytes(), aligned to 16.
  void write(std::byte* table) const;

  // Calls `visit(variant, view)` for each launch; the table lies at `table` when it begins.
  template <class Visit>
  void for_each_launch(const std::byte* table, Visit visit) const {
    for (int index = 0; index < kNumVariants; ++index) {
      const Launch& launch = launches_[static_cast<size_t>(index)];
      if (launch.num_slices > 0) visit(Variant::of_index(index), launch, view(launch, table));
    }
  }

 private:
  Variant variant_of(const SliceUpdate& update) const;
  void place_parts();
  BatchView view(const Launch& launch, const std::byte* table) const;

  const Purpose purpose_;
  const std::span<const SliceUpdate> batch_;
  std::vector<uint16_t> variants_;  // of each update, by index
  std::array<Launch, kNumVariants> launches_{};
  uint64_t steps_ = 0;  // offset: last, as their number is known last
  uint64_t num_steps_ = 0;
};

}  // namespace psstore::gpu
