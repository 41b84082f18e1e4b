// The loops over a slice: reduce a block, apply the rule to it, go on; conversions and checks.
//
// Included once by the .cc file of each instruction set, which is compiled with that set's flags; the
// compiler's vectoriser does the rest, and correctly rounded operations give the same bytes at any
// width. Everything is in an unnamed namespace so that each file keeps its own copy: of functions with
// linkage the linker would keep one, and a plain machine could end up running AVX-512 code.
//
// A block at a time, because the cost is memory: the reduced gradient goes through the first-level
// cache, while contributions, value and state pass once from memory and back.
#pragma once

#include <algorithm>

#include "kernels/compensate.h"
#include "kernels/convert.h"
#include "kernels/elements.h"
#include "kernels/reduce.h"
#include "kernels/steps.h"
#include "kernels/update.h"

namespace psstore {
namespace {

// value = step(value, gradient, states...) over one block; `states` point at the block's state.
template <class T, class Step, class... State>
void apply_to_block(int64_t count, const std::byte* value_in, std::byte* value_out,
                    const std::byte* gradient, Step step, State*... states) {
  const std::byte* const streams[] = {value_in, gradient, states...};
  for_each_streamed<T>(count, streams, [=](int64_t i) {
    // A pack of locals: each state is loaded, updated in a register and stored.
    [&](auto... local) {
      store<T>(value_out, i, step(load<T>(value_in, i), load<T>(gradient, i), local...));
      (store<T>(states, i, local), ...);
    }(load<T>(states, i)...);
  });
}

// The state of slot `slot` from element `begin` on; a new one is first given its initial content.
template <class T>
std::byte* state_block(const SliceUpdate& update, int slot, T initial, int64_t begin,
                       int64_t count) {
  auto* state = static_cast<std::byte*>(update.state[static_cast<size_t>(slot)]) +
                begin * static_cast<int64_t>(sizeof(T));
  if (update.state_is_new >> slot & 1U) fill(state, count, initial);
  return state;
}

// Runs `step` over the slice with the state buffers of the given slots.
template <class Sums, class Step, int... kSlots>
void run(const SliceUpdate& update, const Step& step, Slots<kSlots...>) {
  using T = typename Step::Element;
  constexpr int64_t kBytes = sizeof(T);
  BlockGradient<Sums, T> gradient(update, update.scale);
  CompensatedGradient<T> compensated(update);
  const auto* value_in = static_cast<const std::byte*>(update.value_in);
  auto* value_out = static_cast<std::byte*>(update.value_out);

  const int64_t block_elems = gradient.block_elems();
  for (int64_t begin = 0; begin < update.num_elems; begin += block_elems) {
    const int64_t count = std::min(block_elems, update.num_elems - begin);
    apply_to_block<T>(count, value_in + begin * kBytes, value_out + begin * kBytes,
                      compensated.block(gradient.block(begin, count), begin, count), step,
                      state_block(update, kSlots, step.initial(), begin, count)...);
  }
}

template <class Sums, class T>
void run_rule(const SliceUpdate& update) {
  with_form<T>(step_form(update), [&](auto type) {
    using Step = typename decltype(type)::type;
    run<Sums>(update, Step::make(update), typename Step::States{});
  });
}

template <class Sums>
void reduce_update_loop(const SliceUpdate& update) {
  if (update.dtype == DType::kFloat64) {
    run_rule<Sums, double>(update);
  } else {
    run_rule<Sums, float>(update);
  }
  if (update.shadow != nullptr) {
    convert_loop<ElementConversions>(update.dtype, DType::kBFloat16, update.value_out,
                                     update.shadow, update.num_elems);
  }
}

}  // namespace
}  // namespace psstore
