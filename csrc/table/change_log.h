// What readers of a slot in one dtype are told of its changes, bit for bit (changes/changes.h).
//
//   value       v5 ─────► v6 ───────────────► v9          as decisions made it
//   image       i5 ─ c6 ► i6 ─────── c9 ────► i9          in the readers' dtype, of the versions that were asked for
//                    └────── c6 + c9 ───────►             for who has i5: merged when somebody asks
//
// Changes are made when a version is first asked for, once, and kept for all who have a version before it. Who has one that is
// not among those, or would be told more than the whole, gets the whole.
//
// The image is a copy even where the dtype is the slot's own: a value that is referred to would have every step go
// out of place. At most as many bytes of changes as the image has are kept; the oldest go first.
//
// Guarded, like all of a slot, by the stripe's lock; findings hold what they refer to beyond it.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>

#include "core/buffer.h"
#include "core/memory_budget.h"
#include "core/types.h"
#include "table/backend.h"
#include "table/gather.h"

namespace psstore {

class ChangeLog {
 public:
  // In the readers' dtype, of a slot of so many elements. Takes from the budget what it may keep. Throws
  // Error(OUT_OF_MEMORY).
  ChangeLog(DType dtype, uint64_t num_elems, std::shared_ptr<MemoryBudget> budget);

  DType dtype() const { return dtype_; }

  // For somebody who has version `wanted_version` - 1 of it: the changes since, or the value. `value`: in the
  // `stored` dtype. Throws Error(OUT_OF_MEMORY): then the log is to be forgotten. REQUIRES: there is a value; host memory.
  Finding find(const BufferRef& value, uint64_t version, DType stored, uint64_t wanted_version,
               Backend& backend);

  size_t num_bytes() const;

 private:
  // From that version to the next one in the list, or to the image's.
  struct Step {
    uint64_t since;
    BufferRef payload;
  };

  uint64_t image_bytes() const { return num_elems_ * dtype_bytes(dtype_); }
  void go_on(const BufferRef& value, uint64_t version, DType stored, Backend& backend);
  void add_step(BufferRef payload);
  // The changes between two versions; none: they are not kept, or the whole is smaller.
  std::optional<BufferRef> between(uint64_t since, uint64_t version, Backend& backend);
  std::optional<BufferRef> merged(size_t first, size_t last, Backend& backend) const;
  size_t index_of(uint64_t version) const;

  struct GiveBack {
    std::shared_ptr<MemoryBudget> budget;
    void operator()(const uint64_t* taken) const noexcept;
  };

  DType dtype_;
  uint64_t num_elems_;
  std::unique_ptr<const uint64_t, GiveBack> taken_;
  BufferRef image_;
  uint64_t version_ = 0;
  std::deque<Step> steps_;                // versions ascend
  std::map<uint64_t, BufferRef> merged_;  // up to the image, by the version that they begin at
  uint64_t changes_bytes_ = 0;            // of both
};

}  // namespace psstore
