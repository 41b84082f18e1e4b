// What readers of a slot in one dtype are told of its changes, bit for bit (changes/changes.h).
//
//   value       v5 ─────► v6 ───────────────► v9          as decisions made it
//   image       i5 ─ m6 ► i6 ─────── m9 ────► i9          in the readers' dtype, of the versions that were asked for
//                    └────── m6 | m9 ───────►             for who has i5
//
// When a version is first asked for, what has changed since the one before is marked, a bit for each element. Who has one
// of those versions is sent the elements that any mark since is of, as they are now; made once for all who have it. Who
// has another one, or would be told more than the whole, gets the whole.
//
// The image is a copy even where the dtype is the slot's own: a value that is referred to would have every step go
// out of place. At most as many bytes of marks and changes as the image has are kept; the oldest marks go first.
//
// Guarded, like all of a slot, by the stripe's lock; findings hold what they refer to beyond it.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>

#include "changes/changes.h"
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
    BufferRef marks;
  };

  uint64_t image_bytes() const { return num_elems_ * dtype_bytes(dtype_); }
  uint64_t mark_bytes() const { return num_mark_words(num_elems_) * sizeof(uint64_t); }
  void go_on(const BufferRef& value, uint64_t version, DType stored, Backend& backend);
  // The changes between two versions; none: they are not known, or the whole is smaller.
  std::optional<BufferRef> between(uint64_t since, uint64_t version, const BufferRef& value,
                                   DType stored, Backend& backend);
  // Those of what is marked in the steps from `first` to `last`, to the elements there.
  std::optional<BufferRef> made(size_t first, size_t last, const std::byte* elements,
                                Backend& backend) const;
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
  std::deque<Step> steps_;              // versions ascend
  std::map<uint64_t, BufferRef> made_;  // up to the image, by the version that they begin at
  uint64_t made_bytes_ = 0;
};

}  // namespace psstore
