// After the launch that encodes changes: where one is not finite, all of the slice's base becomes its source. A block
// for each slice, which mostly reads the scales, a 256th of the elements, and is through.
#pragma once

#include "kernels/gpu/encode_body.h"

namespace psstore::gpu {

struct ChangeBody {
  struct Shared {
    uint32_t is_unsaid;
  };
  using Local = Nothing;
  static constexpr int kMinBlocks = 4;

  const EncodeSlice* slices;

  PSSTORE_GPU int num_phases(int64_t) const { return 3; }
  PSSTORE_GPU void run(int phase, int64_t block, int thread, Local&, Shared& shared) const {
    const ToEncode& what = global(slices + block)->what;
    if (phase == 0) {
      if (thread == 0) shared.is_unsaid = 0;
    } else if (phase == 1) {
      if (!says_all(what, thread)) set_atomically(&shared.is_unsaid);
    } else if (shared.is_unsaid != 0) {
      for (int64_t i = thread; i < what.num_elems; i += kThreads) {
        store_one(what.base, i, load_widely<float, 1>(what.source, i)[0]);
      }
    }
  }

 private:
  // Of the blocks that this thread looks at.
  PSSTORE_GPU static bool says_all(const ToEncode& what, int thread) {
    const float largest = largest_code(what.encoding);
    const int64_t num_scales = ceil_divide(what.num_elems, kEncodedBlock);
    bool says = true;
    for (int64_t i = thread; i < num_scales; i += kThreads) {
      says = is_finite(load_widely<float, 1>(what.payload, i)[0] * largest) && says;
    }
    return says;
  }
};

}  // namespace psstore::gpu
