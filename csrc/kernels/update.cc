// Checks an update and hands it to the best kernels that the machine can run.
#include "kernels/update.h"

#include <string>

#include "kernels/kernel_set.h"

namespace psstore {
namespace {

[[noreturn]] void broken(const std::string& what) {
  throw Error(ErrorCode::INTERNAL, "slice update: " + what);
}

}  // namespace

const KernelSet& best_kernels() {
  return *runnable_kernels().front();
}

const KernelSet& kernels_named(std::string_view name) {
  std::string known;
  for (const KernelSet* kernels : runnable_kernels()) {
    if (name == kernels->name) return *kernels;
    known += std::string(known.empty() ? "" : ", ") + kernels->name;
  }
  throw Error(ErrorCode::BAD_ARGUMENT, "instruction set '" + std::string(name) +
                                           "' can't run on this machine; it runs " + known);
}

const KernelSet& kernels_or_best(const std::optional<std::string>& name) {
  return name ? kernels_named(*name) : best_kernels();
}

void check_reduction(const SliceUpdate& update) {
  if (update.dtype != DType::kFloat32 && update.dtype != DType::kFloat64) {
    broken("a tensor is float32 or float64, not dtype " +
           std::to_string(static_cast<int>(update.dtype)));
  }
  for (const Contribution& contribution : update.contributions) {
    if (!is_dtype(contribution.dtype) || !accepts_contribution(update.dtype, contribution.dtype)) {
      broken("a contribution of dtype " + std::to_string(static_cast<int>(contribution.dtype)) +
             " does not fit a tensor of dtype " + std::to_string(static_cast<int>(update.dtype)));
    }
  }
  if (!update.sorted) return;
  const auto [num_zeros, num_dropped] = *update.sorted;
  const uint64_t num_members = update.contributions.size() + num_zeros;
  if (num_members > kMaxSorted || 2 * uint64_t{num_dropped} >= num_members) {
    broken("of " + std::to_string(num_members) + " members " + std::to_string(num_dropped) +
           " are to be dropped at either end; some have to be left, and at most " +
           std::to_string(kMaxSorted) + " can be sorted");
  }
}

void check_update(const SliceUpdate& update) {
  check_reduction(update);
  if (update.step < 1) broken("steps count from 1, not " + std::to_string(update.step));
  if (update.base != nullptr && (update.scale != 1.0 || !compensates(update.rule))) {
    broken("only what takes a step by its gradient, and is not scaled, can be compensated");
  }
  if (!applies_by_decision(update.rule)) return;
  if (update.hyper == nullptr) broken("the rule needs hyper-parameters");
  const StateLayout layout = state_layout(update.rule, *update.hyper);
  for (int slot = 0; slot < kMaxStates; ++slot) {
    if (layout.uses(slot) && update.state[static_cast<size_t>(slot)] == nullptr) {
      broken(std::string("state '") + layout.names[static_cast<size_t>(slot)] + "' has no memory");
    }
  }
}

void reduce_update(const SliceUpdate& update) {
  check_update(update);
  best_kernels().reduce_update(update);
}

double reduced_squares(const SliceUpdate& update) {
  check_reduction(update);
  return best_kernels().reduced_squares(update);
}

void convert(DType from, DType to, const void* source, void* destination, int64_t num_elems) {
  best_kernels().convert(from, to, source, destination, num_elems);
}

bool all_finite(DType dtype, const void* data, int64_t num_elems) {
  return best_kernels().all_finite(dtype, data, num_elems);
}

}  // namespace psstore
