// The loop over rows of a table.
//
// Included only by the .cc file of each instruction set: see loops.h for the unnamed namespace. A row is short: nothing is
// fetched ahead beyond its end, as loops over slices do, and whoever has the rows has begun with their memory.
#pragma once

#include <algorithm>
#include <span>
#include <utility>

#include "kernels/elements.h"
#include "kernels/reduce.h"
#include "kernels/row_values.h"
#include "kernels/rows.h"
#include "rules/sgd.h"
#include "rules/sparse.h"

namespace psstore {
namespace {

// Element i of a mean square is added to partial sum i modulo kSquareLanes, so that the order is the same at any width.
constexpr int64_t kSquareLanes = 8;

template <class Step, class... State>
void step_row(int64_t count, std::byte* value, const std::byte* gradient, Step step,
              State*... states) {
  for_each_index(count, [=](int64_t i) {
    [&](auto... local) {
      store<float>(value, i, step(load<float>(value, i), load<float>(gradient, i), local...));
      (store<float>(states, i, local), ...);
    }(load<float>(states, i)...);
  });
}

inline float mean_square(const std::byte* gradient, int64_t count) {
  double lanes[kSquareLanes] = {};
  for (int64_t i = 0; i < count; ++i) {
    const auto element = static_cast<double>(load<float>(gradient, i));
    lanes[i % kSquareLanes] += element * element;
  }
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return static_cast<float>(sum / static_cast<double>(count));
}

// The gradient of one row, reduced as that of a slice: in `room`, or where it came if it is the only one.
template <class Sums>
const std::byte* reduce_row(const RowsUpdate& rows, const RowToStep& row, float* room) {
  SliceUpdate update;
  update.num_elems = rows.dim;
  update.contributions = row.contributions;
  update.divisor = rows.divisor;
  const std::byte* const sole = rows.scale == 1.0 ? sole_gradient<float>(update) : nullptr;
  if (sole != nullptr && !rows.hyper->maximize) return sole;
  BlockGradient<Sums, float> reduced(update, rows.scale);
  const int64_t block_elems = reduced.block_elems();
  for (int64_t begin = 0; begin < update.num_elems; begin += block_elems) {
    const int64_t count = std::min(block_elems, update.num_elems - begin);
    const std::byte* block = reduced.block(begin, count);
    std::memcpy(room + begin, block, static_cast<size_t>(count) * sizeof(float));
  }
  if (rows.hyper->maximize) {
    for_each_index(update.num_elems, [=](int64_t i) { room[i] = -room[i]; });
  }
  return reinterpret_cast<const std::byte*>(room);
}

// The loop over rows whose rule keeps kStates floats of each element. `Rows`: how values are kept (row_values.h).
template <class Sums, class Rows, size_t kStates, class Step>
void step_each_row(const RowsUpdate& update, std::span<const RowToStep> rows, Step step) {
  alignas(64) float room[kMaxRowDim];
  Rows values(update);
  const int64_t dim = update.dim;
  const int64_t state_bytes = dim * static_cast<int64_t>(sizeof(float));
  for (const RowToStep& row : rows) {
    const std::byte* const gradient = reduce_row<Sums>(update, row, room);
    std::byte* const value = values.open(row);
    std::byte* const states = values.states(row);
    [&]<size_t... kPlaces>(std::index_sequence<kPlaces...>) {
      step_row(dim, value, gradient, step,
               (states + static_cast<int64_t>(kPlaces) * state_bytes)...);
    }(std::make_index_sequence<kStates>());
    values.close(row);
  }
}

template <class Sums, class Rows>
void step_rowwise(const RowsUpdate& update, std::span<const RowToStep> rows) {
  alignas(64) float room[kMaxRowDim];
  Rows values(update);
  const int64_t dim = update.dim;
  const RowwiseAdagrad rule(*update.hyper);
  for (const RowToStep& row : rows) {
    const std::byte* const gradient = reduce_row<Sums>(update, row, room);
    std::byte* const states = values.states(row);
    auto sum = load<float>(states, 0);
    const float factor = rule.factor(mean_square(gradient, dim), sum);
    store<float>(states, 0, sum);
    step_row(dim, values.open(row), gradient,
             [=](float v, float g) { return rule.step(v, g, factor); });
    values.close(row);
  }
}

// Dense SGD of each row, whose gradient ascends already where it was reduced. The first step is the table's, as torch's is
// the parameter's: a row that comes later begins with a buffer of zeros.
template <class Sums, class Rows>
void step_momentum(const RowsUpdate& update, std::span<const RowToStep> rows) {
  Hyper hyper = *update.hyper;
  hyper.maximize = false;
  const Sgd<float> rule(hyper);
  if (update.step == 1) {
    step_each_row<Sums, Rows, 1>(update, rows, [=](float v, float g, float& buffer) {
      return rule.first_step(v, g, buffer);
    });
  } else {
    step_each_row<Sums, Rows, 1>(
        update, rows, [=](float v, float g, float& buffer) { return rule.step(v, g, buffer); });
  }
}

template <class Sums, class Rows, class Power>
void step_ftrl(const RowsUpdate& update, std::span<const RowToStep> rows, Power power) {
  const Ftrl<Power> rule(*update.hyper, power);
  step_each_row<Sums, Rows, 2>(update, rows,
                               [=](float v, float g, float& accumulator, float& linear) {
                                 return rule.step(v, g, accumulator, linear);
                               });
}

template <class Sums, class Rows>
void step_rows_of(const RowsUpdate& update, std::span<const RowToStep> rows) {
  const Hyper& hyper = *update.hyper;
  switch (update.rule) {
    case RuleKind::kSparseSgd:
      step_each_row<Sums, Rows, 0>(
          update, rows, [rule = SparseSgd(hyper)](float v, float g) { return rule.step(v, g); });
      break;
    case RuleKind::kSparseAdagrad:
      step_each_row<Sums, Rows, 1>(
          update, rows, [rule = SparseAdagrad(hyper, update.step)](float v, float g, float& sum) {
            return rule.step(v, g, sum);
          });
      break;
    case RuleKind::kRowwiseAdagrad: step_rowwise<Sums, Rows>(update, rows); break;
    case RuleKind::kSparseAdam:
      step_each_row<Sums, Rows, 2>(update, rows,
                                   [rule = SparseAdam(hyper, update.step)](
                                       float v, float g, float& exp_avg, float& exp_avg_sq) {
                                     return rule.step(v, g, exp_avg, exp_avg_sq);
                                   });
      break;
    case RuleKind::kSparseMomentum: step_momentum<Sums, Rows>(update, rows); break;
    case RuleKind::kFtrl:
      if (hyper.lr_power == -0.5) {
        step_ftrl<Sums, Rows>(update, rows, SquareRootPower{});
      } else {
        step_ftrl<Sums, Rows>(update, rows, AnyPower(hyper));
      }
      break;
    default: break;
  }
}

template <class Sums>
void step_rows_loop(const RowsUpdate& update, std::span<const RowToStep> rows) {
  if (update.dtype == DType::kBFloat16) {
    step_rows_of<Sums, BFloat16Rows>(update, rows);
  } else {
    step_rows_of<Sums, Float32Rows>(update, rows);
  }
}

}  // namespace
}  // namespace psstore
