// Kernels as bodies that a device and a test on the host run alike: what one thread does in one phase.
//
// All threads of a block are through with a phase before one begins the next. What a thread keeps from phase
// to phase is its Local; what the block's threads tell each other is their Shared. So no order of the
// threads, be it the host's one after the other, can change what comes out.
//
//   struct Body {
//     struct Shared {};                                     // one for each block, of no constructors
//     struct Local {};                                      // one for each thread
//     static constexpr int kMinBlocks;  // that a multiprocessor has registers for
//     PSSTORE_GPU int num_phases(int64_t block) const;       // the same for all of its threads
//     PSSTORE_GPU void run(int phase, int64_t block, int thread, Local&, Shared&) const;
//   };
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/gpu/launch_map.h"

namespace psstore::gpu {

// A body of one phase that shares nothing.
struct Nothing {};

// Runs a body's blocks one after the other.
template <class Body>
void run_on_host(const Body& body, int64_t num_blocks, int num_threads = kThreads) {
  for (int64_t block = 0; block < num_blocks; ++block) {
    typename Body::Shared shared;
    std::vector<typename Body::Local> locals(static_cast<size_t>(num_threads));
    for (int phase = 0; phase < body.num_phases(block); ++phase) {
      for (int thread = 0; thread < num_threads; ++thread) {
        body.run(phase, block, thread, locals[static_cast<size_t>(thread)], shared);
      }
    }
  }
}

}  // namespace psstore::gpu
