// The kernels for Python: for tests, benches and the parity table; a shard calls them from C++.
#include <pybind11/stl.h>

#include <list>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/common.h"
#include "kernels/batch_cuda.h"
#include "kernels/kernel_set.h"

namespace psstore::bindings {
namespace {

using HyperByName = std::map<std::string, double>;
using StateByName = std::map<std::string, py::object>;
using GivenContribution = std::tuple<py::object, int, float>;  // (data, dtype, weight)
using Access = PyBytesRange::Access;

std::optional<std::string> cuda_version() {
  if (kCudaVersion == 0) return std::nullopt;
  return std::to_string(kCudaVersion / 1000) + "." + std::to_string(kCudaVersion % 1000 / 10);
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const KernelSet* kernels : runnable_kernels()) names.emplace_back(kernels->name);
  return names;
}

// The Python objects of one call, held while the GIL is released.
class HeldRanges {
 public:
  // Raises SizeMismatch unless `object` has exactly `num_bytes`.
  std::byte* hold(py::handle object, Access access, size_t num_bytes, const std::string& what) {
    const PyBytesRange& range = ranges_.emplace_back(object, access);
    if (range.size() != num_bytes) {
      throw Error(ErrorCode::SIZE_MISMATCH, what + " has " + std::to_string(range.size()) +
                                                " bytes, expected " + std::to_string(num_bytes));
    }
    return range.data();
  }

 private:
  std::list<PyBytesRange> ranges_;
};

DType dtype_or_encoding(int number) {
  const auto dtype = static_cast<DType>(number);
  if (number < 0 || number > 255 || !is_dtype(dtype)) {
    throw Error(ErrorCode::DTYPE_MISMATCH, std::to_string(number) + " is not a dtype's number");
  }
  return dtype;
}

DType checked_dtype(int number) {
  const DType dtype = dtype_or_encoding(number);
  if (is_encoding(dtype)) {
    throw Error(ErrorCode::DTYPE_MISMATCH,
                std::to_string(number) + " is an encoding; encode_slice and decode_slice know it");
  }
  return dtype;
}

DType checked_master_dtype(int number) {
  const DType dtype = checked_dtype(number);
  if (dtype != DType::kFloat32 && dtype != DType::kFloat64) {
    throw Error(ErrorCode::DTYPE_MISMATCH, "a value is float32 or float64, not half precision");
  }
  return dtype;
}

size_t num_elems_of(py::handle value, DType dtype) {
  const size_t num_bytes = PyBytesRange(value).size();
  if (num_bytes % dtype_bytes(dtype) != 0) {
    throw Error(ErrorCode::SIZE_MISMATCH, "value has " + std::to_string(num_bytes) +
                                              " bytes, not a multiple of " +
                                              std::to_string(dtype_bytes(dtype)));
  }
  return num_bytes / dtype_bytes(dtype);
}

// Finds the state buffers of the rule by name. Raises BadArgument for one that is missing.
void hold_state(SliceUpdate& update, HeldRanges& held, const StateByName& state,
                const std::map<std::string, bool>& first, size_t num_bytes) {
  const StateLayout layout = state_layout(update.rule, *update.hyper);
  for (int slot = 0; slot < kMaxStates; ++slot) {
    if (!layout.uses(slot)) continue;
    const std::string name = layout.names[static_cast<size_t>(slot)];
    const auto found = state.find(name);
    if (found == state.end()) {
      throw Error(ErrorCode::BAD_ARGUMENT, "the rule needs the state '" + name + "'");
    }
    update.state[static_cast<size_t>(slot)] =
        held.hold(found->second, Access::kWrite, num_bytes, "state '" + name + "'");
    const auto is_first = first.find(name);
    if (is_first != first.end() && is_first->second) update.state_is_new |= 1U << slot;
  }
}

Contribution hold_contribution(HeldRanges& held, const GivenContribution& given, DType tensor_dtype,
                               size_t num_elems) {
  const auto& [data, dtype_number, weight] = given;
  const DType dtype = dtype_or_encoding(dtype_number);
  if (!accepts_contribution(tensor_dtype, dtype)) {
    throw Error(ErrorCode::DTYPE_MISMATCH, "a float64 contribution does not fit a float32 value");
  }
  const size_t num_bytes =
      dtype == DType::kTopK ? PyBytesRange(data).size() : encoded_bytes(dtype, num_elems);
  const std::byte* bytes = held.hold(data, Access::kRead, num_bytes, "a contribution");
  if (is_encoding(dtype) && !is_well_formed({dtype, bytes, num_bytes, num_elems})) {
    throw Error(ErrorCode::BAD_ARGUMENT,
                "a contribution is no list of ascending indices and values");
  }
  return {bytes, dtype, weight, num_bytes};
}

std::vector<Contribution> hold_contributions(HeldRanges& held,
                                             const std::vector<GivenContribution>& given,
                                             DType tensor_dtype, size_t num_elems) {
  std::vector<Contribution> contributions;
  for (const GivenContribution& one : given) {
    contributions.push_back(hold_contribution(held, one, tensor_dtype, num_elems));
  }
  return contributions;
}

// (zeros, dropped at either end)
using GivenSorted = std::pair<uint32_t, uint32_t>;

std::optional<Sorted> as_sorted(const std::optional<GivenSorted>& given) {
  if (!given) return std::nullopt;
  return Sorted{given->first, given->second};
}

void check_hyper(int rule, const HyperByName& hyper, int dtype) {
  const auto kind = static_cast<RuleKind>(rule);
  parse_hyper(kind, hyper);
  check_fits(kind, hyper, checked_master_dtype(dtype));
}

void reduce_update_by_name(int rule, const HyperByName& hyper_by_name, int64_t step,
                           const py::object& value, const StateByName& state,
                           const std::vector<GivenContribution>& contributions, double divisor,
                           int dtype, const std::map<std::string, bool>& first, double scale,
                           const std::optional<GivenSorted>& sorted, const py::object& base,
                           double compensation, const std::optional<std::string>& instruction_set) {
  const auto kind = static_cast<RuleKind>(rule);
  const Hyper hyper = parse_hyper(kind, hyper_by_name);
  const KernelSet& kernels = kernels_or_best(instruction_set);
  HeldRanges held;
  SliceUpdate update;
  update.rule = kind;
  update.hyper = &hyper;
  update.step = step;
  update.dtype = checked_master_dtype(dtype);
  const size_t num_elems = num_elems_of(value, update.dtype);
  const size_t num_bytes = num_elems * dtype_bytes(update.dtype);
  update.num_elems = static_cast<int64_t>(num_elems);
  update.value_out = held.hold(value, Access::kWrite, num_bytes, "value");
  update.value_in = update.value_out;
  hold_state(update, held, state, first, num_bytes);
  const auto held_contributions = hold_contributions(held, contributions, update.dtype, num_elems);
  update.contributions = held_contributions;
  update.divisor = divisor;
  update.scale = scale;
  update.sorted = as_sorted(sorted);
  if (!base.is_none()) update.base = held.hold(base, Access::kRead, num_bytes, "base");
  update.compensation = compensation;
  check_update(update);
  const py::gil_scoped_release release;
  kernels.reduce_update(update);
}

double reduced_squares_of(int64_t num_elems, const std::vector<GivenContribution>& contributions,
                          double divisor, int dtype, const std::optional<GivenSorted>& sorted,
                          const std::optional<std::string>& instruction_set) {
  if (num_elems < 0) {
    throw Error(ErrorCode::BAD_ARGUMENT,
                "num_elems: expected 0 or more, got " + std::to_string(num_elems));
  }
  const KernelSet& kernels = kernels_or_best(instruction_set);
  HeldRanges held;
  SliceUpdate update;
  update.dtype = checked_master_dtype(dtype);
  update.num_elems = num_elems;
  const auto held_contributions =
      hold_contributions(held, contributions, update.dtype, static_cast<size_t>(num_elems));
  update.contributions = held_contributions;
  update.divisor = divisor;
  update.sorted = as_sorted(sorted);
  check_reduction(update);
  const py::gil_scoped_release release;
  return kernels.reduced_squares(update);
}

void convert_ranges(const py::object& source, int from, const py::object& destination, int to,
                    const std::optional<std::string>& instruction_set) {
  const DType from_dtype = checked_dtype(from);
  const DType to_dtype = checked_dtype(to);
  const KernelSet& kernels = kernels_or_best(instruction_set);
  const size_t num_elems = num_elems_of(source, from_dtype);
  HeldRanges held;
  const std::byte* in =
      held.hold(source, Access::kRead, num_elems * dtype_bytes(from_dtype), "source");
  std::byte* out =
      held.hold(destination, Access::kWrite, num_elems * dtype_bytes(to_dtype), "destination");
  const py::gil_scoped_release release;
  kernels.convert(from_dtype, to_dtype, in, out, static_cast<int64_t>(num_elems));
}

bool all_finite_range(const py::object& data, int dtype,
                      const std::optional<std::string>& instruction_set) {
  const DType checked = checked_dtype(dtype);
  const KernelSet& kernels = kernels_or_best(instruction_set);
  const auto num_elems = static_cast<int64_t>(num_elems_of(data, checked));
  const PyBytesRange range(data);
  const py::gil_scoped_release release;
  return kernels.all_finite(checked, range.data(), num_elems);
}

}  // namespace

void bind_kernels(py::module_& m) {
  m.def("instruction_sets", &instruction_sets);
  m.def("check_hyper", &check_hyper, py::arg("rule"), py::arg("hyper"), py::arg("dtype"));
  m.def("reduce_update", &reduce_update_by_name, py::arg("rule"), py::arg("hyper"), py::kw_only(),
        py::arg("step"), py::arg("value"), py::arg("state"), py::arg("contributions"),
        py::arg("divisor"), py::arg("dtype"), py::arg("first") = std::map<std::string, bool>(),
        py::arg("scale") = 1.0, py::arg("sorts") = py::none(), py::arg("base") = py::none(),
        py::arg("compensation") = 0.0, py::arg("instruction_set") = py::none());
  m.def("reduced_squares", &reduced_squares_of, py::kw_only(), py::arg("num_elems"),
        py::arg("contributions"), py::arg("divisor"), py::arg("dtype"),
        py::arg("sorts") = py::none(), py::arg("instruction_set") = py::none());
  m.def("convert", &convert_ranges, py::arg("source"), py::arg("from_dtype"),
        py::arg("destination"), py::arg("to_dtype"), py::kw_only(),
        py::arg("instruction_set") = py::none());
  m.def("all_finite", &all_finite_range, py::arg("data"), py::arg("dtype"), py::kw_only(),
        py::arg("instruction_set") = py::none());
  m.attr("CUDA_VERSION") = cuda_version();
  m.def("cuda_device_count", &cuda_device_count, py::call_guard<py::gil_scoped_release>());
}

}  // namespace psstore::bindings
