// The loop over rows of a table.
//
// Included only by the .cc file of each instruction set: see loops.h for the unnamed namespace. A row is short: nothing is
// fetched ahead beyond its end, as loops over slices do, and whoever has the rows has begun with their memory.
#pragma once

#include <algorithm>
#include <span>

#include "kernels/elements.h"
#include "kernels/reduce.h"
#include "kernels/rows.h"
#include "rules/sparse.h"

namespace psstore {
namespace {

// Element i of a mean square is added to partial sum i modulo kSquareLanes, so that the order is the same at any width.
constexpr int64_t kSquareLanes = 8;

template <class Step, class... State>
void step_row(int64_t count, std::byte* value, const float* gradient, Step step, State*... states) {
  for_each_index(count, [=](int64_t i) {
    [&](auto... local) {
      store<float>(value, i, step(load<float>(value, i), gradient[i], local...));
      (store<float>(states, i, local), ...);
    }(load<float>(states, i)...);
  });
}

inline float mean_square(const float* gradient, int64_t count) {
  double lanes[kSquareLanes] = {};
  for (int64_t i = 0; i < count; ++i) {
    lanes[i % kSquareLanes] += static_cast<double>(gradient[i]) * static_cast<double>(gradient[i]);
  }
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return static_cast<float>(sum / static_cast<double>(count));
}

// The gradient of one row, reduced as that of a slice.
template <class Sums>
void reduce_row(const RowsUpdate& rows, const RowToStep& row, float* gradient) {
  SliceUpdate update;
  update.num_elems = rows.dim;
  update.contributions = row.contributions;
  update.divisor = rows.divisor;
  BlockGradient<Sums, float> reduced(update, rows.scale);
  const int64_t block_elems = reduced.block_elems();
  for (int64_t begin = 0; begin < update.num_elems; begin += block_elems) {
    const int64_t count = std::min(block_elems, update.num_elems - begin);
    const std::byte* block = reduced.block(begin, count);
    std::memcpy(gradient + begin, block, static_cast<size_t>(count) * sizeof(float));
  }
  if (!rows.hyper->maximize) return;
  for_each_index(update.num_elems, [=](int64_t i) { gradient[i] = -gradient[i]; });
}

template <class Sums>
void step_rows_loop(const RowsUpdate& update, std::span<const RowToStep> rows) {
  alignas(64) float gradient[kMaxRowDim];
  const int64_t dim = update.dim;
  const auto for_each = [&](auto step) {
    for (const RowToStep& row : rows) {
      reduce_row<Sums>(update, row, gradient);
      step(row.value, row.value + dim * static_cast<int64_t>(sizeof(float)));
    }
  };
  switch (update.rule) {
    case RuleKind::kSparseSgd:
      for_each([&, rule = SparseSgd(*update.hyper)](std::byte* value, std::byte*) {
        step_row(dim, value, gradient, [=](float v, float g) { return rule.step(v, g); });
      });
      break;
    case RuleKind::kSparseAdagrad:
      for_each([&, rule = SparseAdagrad(*update.hyper, update.step)](std::byte* value,
                                                                     std::byte* state) {
        step_row(
            dim, value, gradient,
            [=](float v, float g, float& sum) { return rule.step(v, g, sum); }, state);
      });
      break;
    case RuleKind::kRowwiseAdagrad:
      for_each([&, rule = RowwiseAdagrad(*update.hyper)](std::byte* value, std::byte* state) {
        auto sum = load<float>(state, 0);
        const float factor = rule.factor(mean_square(gradient, dim), sum);
        store<float>(state, 0, sum);
        step_row(dim, value, gradient, [=](float v, float g) { return rule.step(v, g, factor); });
      });
      break;
    case RuleKind::kSparseAdam:
      for_each(
          [&, rule = SparseAdam(*update.hyper, update.step)](std::byte* value, std::byte* state) {
            step_row(
                dim, value, gradient,
                [=](float v, float g, float& exp_avg, float& exp_avg_sq) {
                  return rule.step(v, g, exp_avg, exp_avg_sq);
                },
                state, state + dim * static_cast<int64_t>(sizeof(float)));
          });
      break;
    default: break;
  }
}

}  // namespace
}  // namespace psstore
