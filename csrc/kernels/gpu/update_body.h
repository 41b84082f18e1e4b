// The fused pass: each thread reduces a vector's gradients and steps it, vector after vector.
#pragma once

#include <type_traits>

#include "kernels/gpu/batch.h"
#include "kernels/gpu/block.h"
#include "kernels/gpu/sources.h"

namespace psstore::gpu {

// One slice, its descriptor in registers. `Step`: a form of steps.h; `Sources`: how gradients are read.
template <class Step, class Sources>
class SliceStepper {
  using T = typename Step::Element;
  static constexpr Alignment kOwn = Sources::kAligned ? Alignment::kPack : Alignment::kElement;

 public:
  PSSTORE_GPU SliceStepper(const BatchView& batch, const Slice& slice)
      : slice_(slice),
        step_(*reinterpret_cast<const Step*>(batch.steps[slice.step].bytes)),
        sources_(batch, slice),
        divisor_(static_cast<T>(slice.divisor)),
        scale_(static_cast<T>(slice.scale)) {}

  PSSTORE_GPU void step_vector(int64_t chunk, int thread) const {
    visit_vector(
        slice_.vectors, slice_.vectors.begin(chunk, thread),
        [&](int64_t begin) { step<kVectorElems<T>>(begin, typename Step::States{}); },
        [&](int64_t i) { step<1>(i, typename Step::States{}); });
  }

 private:
  template <int N, int... kSlots>
  PSSTORE_GPU void step(int64_t begin, Slots<kSlots...>) const {
    Pack<T, N> value = load_pack<T, N, kOwn>(slice_.value_in, begin);
    step_states(begin, value, state_pack<N>(begin, kSlots)...);
    store_pack<kOwn>(slice_.value_out, begin, value);
    if (slice_.shadow != nullptr) store_shadow(begin, value);
  }

  // `states` in the order of the form's slots.
  template <int N, class... Packs>
  PSSTORE_GPU void step_states(int64_t begin, Pack<T, N>& value, Packs... states) const {
    Pack<T, N> grad = sources_.template sum<N>(begin);
    divide_and_scale(grad, divisor_, scale_);
    for (int e = 0; e < N; ++e) value[e] = step_(value[e], grad[e], states[e]...);
    store_states(begin, typename Step::States{}, states...);
  }

  template <int... kSlots, class... Packs>
  PSSTORE_GPU void store_states([[maybe_unused]] int64_t begin, Slots<kSlots...>,
                                const Packs&... states) const {
    (store_pack<kOwn>(slice_.state[kSlots], begin, states), ...);
  }

  template <int N>
  PSSTORE_GPU Pack<T, N> state_pack(int64_t begin, int slot) const {
    if ((slice_.state_is_new >> slot & 1U) == 0) {
      return load_pack<T, N, kOwn>(slice_.state[slot], begin);
    }
    Pack<T, N> fresh;
    for (int e = 0; e < N; ++e) fresh[e] = step_.initial();
    return fresh;
  }

  template <int N>
  PSSTORE_GPU void store_shadow(int64_t begin, const Pack<T, N>& value) const {
    Pack<BFloat16, N> rounded;
    for (int e = 0; e < N; ++e) rounded[e] = to_bfloat16(static_cast<float>(value[e]));
    store_pack<kOwn>(slice_.shadow, begin, rounded);
  }

  Slice slice_;
  Step step_;
  Sources sources_;
  T divisor_;
  T scale_;
};

// Blocks to a multiprocessor: registers (128, 80 or 64 a thread) against loads under way. Those are 16 bytes of
// each stream for each thread, and have to cover the latency of HBM: at 4.8 TB/s and 0.8 us that is 29 KiB
// for each of 132 multiprocessors (Little's law). With many streams few threads have that, and need the
// registers; double arithmetic takes two for each number.
template <class T>
constexpr int min_blocks(size_t num_streams) {
  if (num_streams >= 7 || sizeof(T) == sizeof(double)) return 2;
  return num_streams >= 3 ? 3 : 4;
}

template <class Step, class Sources>
struct UpdateBody {
  using Shared = Nothing;
  using Local = Nothing;
  static constexpr int kMinBlocks =
      min_blocks<typename Step::Element>(Sources::kStreams + 1 + Step::States::size());

  BatchView batch;

  PSSTORE_GPU int num_phases(int64_t) const { return 1; }
  PSSTORE_GPU void run(int, int64_t block, int thread, Local&, Shared&) const {
    visit_slices(batch, block, [&](const Slice& slice, int64_t begin, int64_t end) {
      const SliceStepper<Step, Sources> stepper(batch, slice);
      PSSTORE_ROLLED  // registers are better spent on threads
      for (int64_t chunk = begin; chunk < end; ++chunk) stepper.step_vector(chunk, thread);
    });
  }
};

}  // namespace psstore::gpu
