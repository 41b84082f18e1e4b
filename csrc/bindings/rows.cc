// GroupedIds for Python, and how large parts of partitions are.
#include "rows/grouped_ids.h"

#include <pybind11/stl.h>

#include <cstring>
#include <string>

#include "bindings/memory.h"
#include "kernels/rows.h"
#include "rows/admission.h"
#include "table/schema.h"

namespace psstore::bindings {
namespace {

void expect_bytes(const char* what, size_t expected, size_t came) {
  if (expected == came) return;
  throw Error(ErrorCode::BAD_ARGUMENT, std::string(what) + " has " + std::to_string(came) +
                                           " bytes, expected " + std::to_string(expected));
}

void check_dim(uint32_t dim) {
  if (1 <= dim && dim <= kMaxRowDim) return;
  throw Error(ErrorCode::BAD_ARGUMENT, "dim is " + std::to_string(dim) + "; rows have 1 to " +
                                           std::to_string(kMaxRowDim) + " elements");
}

GroupedIds group(const py::object& ids, int partition_bits) {
  if (partition_bits < 0 || partition_bits > kMaxPartitionBits) {
    throw Error(ErrorCode::BAD_ARGUMENT, "partition_bits is " + std::to_string(partition_bits));
  }
  const PyBytesRange given(ids);
  const size_t num_ids = given.size() / sizeof(uint64_t);
  if (num_ids >= UINT32_MAX) {
    throw Error(ErrorCode::BAD_ARGUMENT, std::to_string(num_ids) + " ids; give fewer at a time");
  }
  const py::gil_scoped_release no_gil;
  return {{reinterpret_cast<const uint64_t*>(given.data()), num_ids}, partition_bits};
}

void pack(const GroupedIds& self, const py::object& gradients, uint32_t dim,
          const py::object& packed) {
  check_dim(dim);
  const PyBytesRange from(gradients);
  const PyBytesRange to(packed, PyBytesRange::Access::kWrite);
  expect_bytes("gradients", self.num_given() * dim * sizeof(float), from.size());
  expect_bytes("packed", self.packed_bytes(dim), to.size());
  const py::gil_scoped_release no_gil;
  self.pack(reinterpret_cast<const float*>(from.data()), dim, to.data());
}

void scatter(const GroupedIds& self, const py::object& rows, uint32_t dim, const py::object& out) {
  check_dim(dim);
  const PyBytesRange from(rows);
  const PyBytesRange to(out, PyBytesRange::Access::kWrite);
  expect_bytes("rows", self.ids().size() * dim * sizeof(float), from.size());
  expect_bytes("out", self.num_given() * dim * sizeof(float), to.size());
  const py::gil_scoped_release no_gil;
  self.scatter(reinterpret_cast<const float*>(from.data()), dim,
               reinterpret_cast<float*>(to.data()));
}

}  // namespace

void bind_rows(py::module_& m) {
  m.def(
      "row_record_bytes",
      [](uint8_t rule, uint32_t dim, bool evicts) {
        check_dim(dim);
        return row_shape_of(RuleKind{rule}, dim, evicts).record_bytes();
      },
      py::arg("rule"), py::arg("dim"), py::arg("evicts"));
  m.def(
      "counted_bytes",
      [](uint32_t admit_after, uint64_t max_rows) {
        const bool counts = admit_after > 1;
        const auto admission =
            Admission::make({.max_rows = max_rows,
                             .admission = counts ? AdmissionKind::kAfter : AdmissionKind::kAlways,
                             .admit_after = admit_after},
                            0);
        return admission ? admission->counted_bytes() : size_t{0};
      },
      py::arg("admit_after"), py::arg("max_rows"));
  py::class_<GroupedIds>(m, "GroupedIds", py::is_final())
      .def(py::init(&group), py::arg("ids"), py::arg("partition_bits"))
      .def_property_readonly("begins",
                             [](const GroupedIds& self) {
                               return std::vector<size_t>(self.begins().begin(),
                                                          self.begins().end());
                             })
      .def(
          "ids",
          [](const GroupedIds& self, size_t begin, size_t end) {
            const auto ids = self.ids();
            if (begin > end || end > ids.size()) throw py::index_error();
            return py::bytes(reinterpret_cast<const char*>(ids.data() + begin),
                             (end - begin) * sizeof(uint64_t));
          },
          py::arg("begin"), py::arg("end"))
      .def("packed_bytes", &GroupedIds::packed_bytes, py::arg("dim"))
      .def("pack", &pack, py::arg("gradients"), py::arg("dim"), py::arg("packed"))
      .def("scatter", &scatter, py::arg("rows"), py::arg("dim"), py::arg("out"));
}

}  // namespace psstore::bindings
