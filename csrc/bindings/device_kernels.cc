// The kernels of a device for Python: for tests and benches, which name its memory by addresses. These are
// believed.
#include <pybind11/stl.h>

#include <deque>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/common.h"
#include "device/device.h"
#include "kernels/kernel_set.h"
#include "rules/hyper.h"

namespace psstore::bindings {
namespace {

using Address = uintptr_t;
using ContributionAt = std::tuple<Address, int, float, uint64_t>;  // (.., dtype, weight, bytes)

template <class T = void>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

class SliceBatch {
 public:
  std::span<const SliceUpdate> updates() const { return updates_; }

  // Takes over what the update is to point to. Throws what check_update() throws.
  void add(const Hyper& hyper, std::vector<Contribution> contributions, SliceUpdate update) {
    update.hyper = &hyper;
    update.contributions = contributions;
    check_update(update);
    update.hyper = &hypers_.emplace_back(hyper);
    update.contributions = contributions_.emplace_back(std::move(contributions));
    updates_.push_back(update);
  }

 private:
  // Of a deque the elements stay where they are while it grows.
  std::deque<Hyper> hypers_;
  std::deque<std::vector<Contribution>> contributions_;
  std::vector<SliceUpdate> updates_;
};

std::vector<Contribution> contributions_of(const std::vector<ContributionAt>& given) {
  std::vector<Contribution> contributions;
  for (const auto& [address, dtype, weight, num_bytes] : given) {
    contributions.push_back({.data = pointer<>(address),
                             .dtype = static_cast<DType>(dtype),
                             .weight = weight,
                             .num_bytes = num_bytes});
  }
  return contributions;
}

void set_state(SliceUpdate& update, const Hyper& hyper, const std::map<std::string, Address>& state,
               const std::map<std::string, bool>& first) {
  const StateLayout layout = state_layout(update.rule, hyper);
  for (int slot = 0; slot < kMaxStates; ++slot) {
    if (!layout.uses(slot)) continue;
    const auto index = static_cast<size_t>(slot);
    const auto found = state.find(layout.names[index]);
    if (found == state.end()) {
      throw Error(ErrorCode::BAD_ARGUMENT,
                  std::string("the rule needs the state '") + layout.names[index] + "'");
    }
    update.state[index] = pointer<>(found->second);
    const auto is_first = first.find(layout.names[index]);
    if (is_first != first.end() && is_first->second) update.state_is_new |= 1U << slot;
  }
}

void add_slice(SliceBatch& batch, int rule, const std::map<std::string, double>& hyper_by_name,
               int64_t step, int dtype, int64_t num_elems, Address value,
               const std::map<std::string, Address>& state,
               const std::vector<ContributionAt>& contributions, double divisor,
               const std::map<std::string, bool>& first, double scale, Address value_in,
               Address shadow) {
  const auto kind = static_cast<RuleKind>(rule);
  const Hyper hyper = parse_hyper(kind, hyper_by_name);
  SliceUpdate update;
  update.rule = kind;
  update.step = step;
  update.dtype = static_cast<DType>(dtype);
  update.num_elems = num_elems;
  update.divisor = divisor;
  update.scale = scale;
  update.value_in = pointer<const void>(value_in == 0 ? value : value_in);
  update.value_out = pointer<>(value);
  update.shadow = pointer<>(shadow);
  set_state(update, hyper, state, first);
  batch.add(hyper, contributions_of(contributions), update);
}

void reduce_update_here(const SliceBatch& batch, const std::optional<std::string>& name) {
  const KernelSet& kernels = name ? kernels_named(*name) : best_kernels();
  for (const SliceUpdate& update : batch.updates()) kernels.reduce_update(update);
}

std::vector<double> reduced_squares_here(const SliceBatch& batch,
                                         const std::optional<std::string>& name) {
  const KernelSet& kernels = name ? kernels_named(*name) : best_kernels();
  std::vector<double> sums;
  for (const SliceUpdate& update : batch.updates()) sums.push_back(kernels.reduced_squares(update));
  return sums;
}

void queue_reduce_update(const SliceBatch& batch, device::Queue& queue) {
  queue.reduce_update(batch.updates());
}

void queue_reduced_squares(const SliceBatch& batch, device::Queue& queue, Address sums) {
  queue.reduced_squares(batch.updates(), pointer<double>(sums));
}

void queue_convert(device::Queue& queue, int from, int to, Address source, Address destination,
                   int64_t num_elems) {
  queue.convert(static_cast<DType>(from), static_cast<DType>(to), pointer<const void>(source),
                pointer<>(destination), num_elems);
}

void queue_encode(device::Queue& queue, int encoding, Address source, Address residual,
                  Address payload, int64_t num_elems, int64_t num_kept) {
  const ToEncode what{.encoding = static_cast<DType>(encoding),
                      .source = pointer<const void>(source),
                      .residual = pointer<>(residual),
                      .num_elems = num_elems,
                      .num_kept = num_kept,
                      .payload = pointer<>(payload)};
  queue.encode({&what, 1});
}

// (encoding, source, base, payload, elements)
using GivenChange = std::tuple<int, Address, Address, Address, int64_t>;

void queue_encode_changes(device::Queue& queue, const std::vector<GivenChange>& given) {
  std::vector<ToEncode> changes;
  for (const auto& [encoding, source, base, payload, num_elems] : given) {
    changes.push_back({.encoding = static_cast<DType>(encoding),
                       .source = pointer<const void>(source),
                       .base = pointer<>(base),
                       .num_elems = num_elems,
                       .payload = pointer<>(payload)});
  }
  queue.encode_changes(changes);
}

void queue_decode(device::Queue& queue, int encoding, Address payload, uint64_t num_bytes,
                  Address destination, uint64_t num_elems) {
  queue.decode({static_cast<DType>(encoding), pointer<const void>(payload), num_bytes, num_elems},
               pointer<>(destination));
}

}  // namespace

void bind_batches(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> without_gil;
  py::class_<SliceBatch>(m, "SliceBatch", py::is_final())
      .def(py::init<>())
      .def("__len__", [](const SliceBatch& self) { return self.updates().size(); })
      .def("add", &add_slice, py::arg("rule"), py::arg("hyper"), py::kw_only(), py::arg("step"),
           py::arg("dtype"), py::arg("num_elems"), py::arg("value"), py::arg("state"),
           py::arg("contributions"), py::arg("divisor"),
           py::arg("first") = std::map<std::string, bool>(), py::arg("scale") = 1.0,
           py::arg("value_in") = 0, py::arg("shadow") = 0)
      .def("reduce_update", &reduce_update_here, py::kw_only(),
           py::arg("instruction_set") = py::none(), without_gil)
      .def("reduced_squares", &reduced_squares_here, py::kw_only(),
           py::arg("instruction_set") = py::none(), without_gil)
      .def("queue_reduce_update", &queue_reduce_update, py::arg("queue"), without_gil)
      .def("queue_reduced_squares", &queue_reduced_squares, py::arg("queue"), py::arg("sums"),
           without_gil);
  m.def("queue_convert", &queue_convert, py::arg("queue"), py::kw_only(), py::arg("from_dtype"),
        py::arg("to_dtype"), py::arg("source"), py::arg("destination"), py::arg("num_elems"),
        without_gil);
  m.def("queue_encode", &queue_encode, py::arg("queue"), py::arg("encoding"), py::kw_only(),
        py::arg("source"), py::arg("residual"), py::arg("payload"), py::arg("num_elems"),
        py::arg("k") = 0, without_gil);
  m.def("queue_encode_changes", &queue_encode_changes, py::arg("queue"), py::arg("changes"),
        without_gil);
  m.def("queue_decode", &queue_decode, py::arg("queue"), py::arg("encoding"), py::kw_only(),
        py::arg("payload"), py::arg("num_bytes"), py::arg("destination"), py::arg("num_elems"),
        without_gil);
}

}  // namespace psstore::bindings
