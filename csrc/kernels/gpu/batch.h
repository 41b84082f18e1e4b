// A batch of slices as a kernel reads it: written by plan.cc, each slice with its vectors, its sources and
// its step.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/gpu/launch_map.h"
#include "kernels/steps.h"

namespace psstore::gpu {

// A contribution.
struct Source {
  const void* data;
  uint64_t num_bytes;  // read of kTopK only
  float weight;
  DType dtype;
};

struct Slice {
  VectorMap vectors;
  int64_t first_chunk;  // of the launch's
  const void* value_in;
  void* value_out;
  void* shadow;
  void* state[kMaxStates];
  double divisor;
  double scale;
  uint32_t first_source;
  uint32_t num_sources;
  uint32_t step;  // index of a StepBytes
  uint32_t state_is_new;
  uint32_t position;           // in the batch
  uint32_t sources_are_alike;  // of one dtype, and whole vectors of theirs are whole accesses
};

// A form of a step (steps.h) as bytes.
inline constexpr size_t kStepBytes = 128;
struct alignas(8) StepBytes {
  std::byte bytes[kStepBytes];
};

// One launch. The slices are followed by one whose first chunk is the number of chunks.
struct BatchView {
  const Slice* slices;
  const Source* sources;
  const StepBytes* steps;
  const uint32_t* first_slices;  // of each block
  Grid grid;
};

// Calls `visit(slice, begin, end)` for the chunks [begin, end) of each slice that the block has a part in;
// chunks count from the slice's first.
// `View`: a BatchView, or another one of slices, their first ones and a grid.
template <class View, class Visit>
PSSTORE_GPU void visit_slices(const View& batch, int64_t block, Visit visit) {
  const auto* slice = batch.slices + batch.first_slices[block];
  int64_t chunk = batch.grid.begin(block);
  const int64_t end = batch.grid.end(block);
  for (; chunk < end; ++slice) {
    const int64_t next = slice[1].first_chunk;
    const int64_t last = next < end ? next : end;
    if (last <= chunk) continue;  // an empty slice has no chunks
    visit(*slice, chunk - slice->first_chunk, last - slice->first_chunk);
    chunk = last;
  }
}

}  // namespace psstore::gpu
