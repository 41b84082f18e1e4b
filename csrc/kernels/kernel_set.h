// The kernels compiled for one instruction set, and which of them this machine can run.
//
// Every set gives the same bytes. Which sets exist is decided by the files that CMake compiles for the
// target (kernels.cmake): x86/ on x86-64, portable/ elsewhere.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "kernels/codec.h"
#include "kernels/rows.h"
#include "kernels/update.h"

namespace psstore {

struct KernelSet {
  const char* name;
  void (*reduce_update)(const SliceUpdate& update);      // trusts its argument
  double (*reduced_squares)(const SliceUpdate& update);  // trusts its argument
  void (*convert)(DType from, DType to, const void* source, void* destination, int64_t num_elems);
  bool (*all_finite)(DType dtype, const void* data, int64_t num_elems);
  void (*encode)(const ToEncode& what);                       // trusts its argument
  void (*decode)(const Encoded& encoded, void* destination);  // trusts its arguments
  void (*step_rows)(const RowsUpdate& update, std::span<const RowToStep> rows);
};

// Compiled for the target's baseline; what the other sets are tested against.
extern const KernelSet kPlainKernels;

// What this machine can run, best first; the last one is kPlainKernels. Never empty.
std::span<const KernelSet* const> runnable_kernels();

// The best set, or the one of that name. Throws Error(BAD_ARGUMENT) for a name that can't run here.
const KernelSet& best_kernels();
const KernelSet& kernels_named(std::string_view name);
// The set of that name; the best one where none is given. Throws what kernels_named() throws.
const KernelSet& kernels_or_best(const std::optional<std::string>& name);

// Throws Error(INTERNAL) if `update` breaks what reduce_update() requires.
void check_update(const SliceUpdate& update);
// The same for what reduced_squares() requires.
void check_reduction(const SliceUpdate& update);

}  // namespace psstore
