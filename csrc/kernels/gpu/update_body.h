// The fused pass: each thread reduces a vector's gradients and steps it, vector after vector.
#pragma once

#include <type_traits>
#include <utility>

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

  // A thread's vectors of the chunks [chunk, end), kCount of them at once where they are whole: all is read before
  // anything is written, so that their loads are under way together.
  template <int kCount>
  PSSTORE_GPU void step_chunks(int64_t chunk, int64_t end, int thread) const {
    constexpr int kElems = kVectorElems<T>;
    constexpr int kChunkElems = kThreads * kElems;
    const VectorMap vectors{slice_.vectors.num_elems, kElems, slice_.vectors.lead};
    int64_t begin = vectors.begin(chunk, thread);
    auto left = static_cast<int>(end - chunk);
    PSSTORE_ROLLED  // registers are better spent on threads
    while (left > 0) {
      const int64_t last = begin + (kCount - 1) * kChunkElems;
      const bool at_once = kCount > 1 && left >= kCount && begin >= 0 && vectors.is_whole(last);
      if (at_once) {
        Loaded<kElems> loaded[kCount];
        for (int v = 0; v < kCount; ++v) loaded[v] = load<kElems>(begin + v * kChunkElems);
        for (int v = 0; v < kCount; ++v) finish(begin + v * kChunkElems, loaded[v]);
      } else {
        visit_vector(
            vectors, begin, [&](int64_t whole) { finish(whole, load<kElems>(whole)); },
            [&](int64_t i) { finish(i, load<1>(i)); });
      }
      begin += at_once ? kCount * kChunkElems : kChunkElems;
      left -= at_once ? kCount : 1;
    }
  }

 private:
  using States = typename Step::States;
  // A member, as nvcc warns where a function of the device asks for it, be it in an argument of a template.
  static constexpr int kNumStates{States::size()};

  // What a step reads.
  template <int N>
  struct Loaded {
    Pack<T, N> value;
    Pack<T, N> states[kNumStates > 0 ? kNumStates : 1];  // in the order of the form's slots
    typename Sources::template Loaded<N> gradients;
  };

  template <int N>
  PSSTORE_GPU Loaded<N> load(int64_t begin) const {
    Loaded<N> loaded;
    loaded.value = load_pack<T, N, kOwn>(slice_.value_in, begin);
    load_states(begin, loaded, States{});
    loaded.gradients = sources_.template load<N>(begin);
    return loaded;
  }

  template <int N>
  PSSTORE_GPU void finish(int64_t begin, Loaded<N> loaded) const {
    Pack<T, N> grad = sources_.template sum<N>(begin, loaded.gradients);
    divide_and_scale(grad, divisor_, scale_);
    step_elements(loaded, grad, std::make_integer_sequence<int, kNumStates>{});
    store_states(begin, loaded, States{});
    store_pack<kOwn>(slice_.value_out, begin, loaded.value);
    if (slice_.shadow != nullptr) store_shadow(begin, loaded.value);
  }

  template <int N, int... kIndex>
  PSSTORE_GPU void step_elements(Loaded<N>& loaded, const Pack<T, N>& grad,
                                 std::integer_sequence<int, kIndex...>) const {
    for (int e = 0; e < N; ++e) {
      loaded.value[e] = step_(loaded.value[e], grad[e], loaded.states[kIndex][e]...);
    }
  }

  template <int N, int... kSlots>
  PSSTORE_GPU void load_states([[maybe_unused]] int64_t begin, [[maybe_unused]] Loaded<N>& loaded,
                               Slots<kSlots...>) const {
    [[maybe_unused]] int index = 0;
    ((loaded.states[index++] = state_pack<N>(begin, kSlots)), ...);
  }

  template <int N, int... kSlots>
  PSSTORE_GPU void store_states([[maybe_unused]] int64_t begin,
                                [[maybe_unused]] const Loaded<N>& loaded, Slots<kSlots...>) const {
    [[maybe_unused]] int index = 0;
    (store_pack<kOwn>(slice_.state[kSlots], begin, loaded.states[index++]), ...);
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

// A multiprocessor has so many bytes of loads under way, at least, where its blocks are as few as the above: measured on
// an H200 (docs/cuda.md), whose plain copy rate they reach from here on.
inline constexpr size_t kBytesUnderWay = 60 << 10;

// Vectors that a thread takes at once to have them. For more than two there are no registers.
constexpr int vectors_at_once(size_t bytes_of_vector, int blocks) {
  return bytes_of_vector * kThreads * static_cast<size_t>(blocks) >= kBytesUnderWay ? 1 : 2;
}

template <class Step, class Sources>
struct UpdateBody {
  using Shared = Nothing;
  using Local = Nothing;
  static constexpr int kMinBlocks =
      min_blocks<typename Step::Element>(Sources::kStreams + 1 + Step::States::size());

  // The general sources have groups of their own under way.
  static constexpr int kVectors =
      Sources::kAligned
          ? vectors_at_once(16 * (1 + Step::States::size()) + Sources::kVectorBytes, kMinBlocks)
          : 1;

  BatchView batch;

  PSSTORE_GPU int num_phases(int64_t) const { return 1; }
  PSSTORE_GPU void run(int, int64_t block, int thread, Local&, Shared&) const {
    visit_slices(batch, block, [&](const Slice& slice, int64_t begin, int64_t end) {
      const SliceStepper<Step, Sources> stepper(batch, slice);
      stepper.template step_chunks<kVectors>(begin, end, thread);
    });
  }
};

}  // namespace psstore::gpu
