// A batch of updates made launches and a table of descriptors: all that the host does for a batch.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

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

  bool operator==(const Launch&) const = default;
};

enum class Purpose : uint8_t { kUpdate, kSquares };

// What a batch needs. A plan is a value of some kilobytes: nothing is allocated for it.
class Plan {
 public:
  // Throws Error(INTERNAL) for an update that breaks what update.h requires.
  Plan(Purpose purpose, std::span<const SliceUpdate> batch);

  uint64_t num_bytes() const { return steps_ + num_steps_ * sizeof(StepBytes); }

  // The table, to `table`; of num_bytes(), aligned to 16.
  void write(std::span<const SliceUpdate> batch, std::byte* table) const;

  // Calls `visit(variant, view)` for each launch; the table lies at `table` when it begins.
  template <class Visit>
  void for_each_launch(const std::byte* table, Visit visit) const {
    for (int index = 0; index < kNumVariants; ++index) {
      const Launch& launch = launches_[static_cast<size_t>(index)];
      if (launch.num_slices > 0) visit(Variant::of_index(index), launch, view(launch, table));
    }
  }

  // Whether launches that were made for `other` read a table of this plan as well.
  bool fits(const Plan& other) const {
    return launches_ == other.launches_ && num_bytes() <= other.num_bytes();
  }

 private:
  Variant variant_of(const SliceUpdate& update) const;
  void place_parts();
  BatchView view(const Launch& launch, const std::byte* table) const;

  Purpose purpose_;
  std::array<Launch, kNumVariants> launches_{};
  uint64_t steps_ = 0;  // offset: last, because their number may change from one step to the next
  uint64_t num_steps_ = 0;
};

}  // namespace psstore::gpu
