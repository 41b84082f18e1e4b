// GroupedIds and what codecs do with rows for Python, and how large parts of partitions are.
#include "rows/grouped_ids.h"

#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/memory.h"
#include "kernels/rows.h"
#include "rows/admission.h"
#include "rows/overlay.h"
#include "rows/row_cache.h"
#include "rows/row_residuals.h"
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

bool are_grouped(const GroupedIds& self, const py::object& ids) {
  const PyBytesRange given(ids);
  return self.are({reinterpret_cast<const uint64_t*>(given.data()), given.size() / kIdBytes});
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

DType row_dtype(uint8_t number) {
  if (rows_travel_as(DType{number})) return DType{number};
  throw Error(ErrorCode::BAD_ARGUMENT, "rows do not travel in dtype " + std::to_string(number) +
                                           "; expected float32, bfloat16, float16 or int8");
}

// Of rows as a table keeps them, and as a caller has them.
DType kept_dtype(uint8_t number) {
  if (is_dtype_of_rows(DType{number})) return DType{number};
  throw Error(ErrorCode::BAD_ARGUMENT, "rows are not kept in dtype " + std::to_string(number) +
                                           "; expected float32 or bfloat16");
}

void pack(const GroupedIds& self, const py::object& gradients, uint32_t dim,
          const py::object& packed, uint8_t dtype, const py::object& residuals) {
  check_dim(dim);
  const DType of = row_dtype(dtype);
  const PyBytesRange from(gradients);
  const PyBytesRange to(packed, PyBytesRange::Access::kWrite);
  expect_bytes("gradients", self.num_given() * dim * sizeof(float), from.size());
  expect_bytes("packed", self.packed_bytes(dim, of), to.size());
  std::optional<PyBytesRange> kept;
  if (!residuals.is_none()) {
    kept.emplace(residuals, PyBytesRange::Access::kWrite);
    expect_bytes("residuals", self.ids().size() * dim * sizeof(float), kept->size());
  }
  const py::gil_scoped_release no_gil;
  self.pack(reinterpret_cast<const float*>(from.data()), dim, of,
            kept ? reinterpret_cast<float*>(kept->data()) : nullptr, to.data());
}

std::unique_ptr<RowResiduals> make_residuals(uint32_t dim, size_t max_rows) {
  check_dim(dim);
  if (max_rows < 1 || max_rows > kMaxRows) {
    throw Error(ErrorCode::BAD_ARGUMENT, "max_rows is " + std::to_string(max_rows) +
                                             "; expected 1 to " + std::to_string(kMaxRows));
  }
  return std::make_unique<RowResiduals>(dim, max_rows);
}

// The ids, and memory for their residuals.
struct Kept {
  Kept(const RowResiduals& self, const py::object& given_ids, const py::object& given,
       PyBytesRange::Access access, PyBytesRange::Access to_ids = PyBytesRange::Access::kRead)
      : ids(given_ids, to_ids), residuals(given, access) {
    expect_bytes("residuals", num_ids() * self.dim() * sizeof(float), residuals.size());
  }
  size_t num_ids() const { return ids.size() / sizeof(uint64_t); }
  std::span<const uint64_t> span() const {
    return {reinterpret_cast<const uint64_t*>(ids.data()), num_ids()};
  }

  PyBytesRange ids;
  PyBytesRange residuals;
};

// Likewise, and for their ages.
struct Saved {
  Saved(const RowResiduals& self, const py::object& given_ids, const py::object& given,
        const py::object& given_ages, PyBytesRange::Access access)
      : kept(self, given_ids, given, access, access), ages(given_ages, access) {
    expect_bytes("ages", kept.num_ids() * sizeof(uint32_t), ages.size());
  }

  Kept kept;
  PyBytesRange ages;
};

void bind_residuals(py::module_& m) {
  py::class_<RowResiduals>(m, "RowResiduals", py::is_final())
      .def(py::init(&make_residuals), py::arg("dim"), py::arg("max_rows"))
      .def_property_readonly("num_rows", &RowResiduals::num_rows)
      .def(
          "read",
          [](const RowResiduals& self, const py::object& ids, const py::object& residuals) {
            const Kept kept(self, ids, residuals, PyBytesRange::Access::kWrite);
            self.read(kept.span(), reinterpret_cast<float*>(kept.residuals.data()));
          },
          py::arg("ids"), py::arg("residuals"))
      .def(
          "write",
          [](RowResiduals& self, const py::object& ids, const py::object& residuals) {
            const Kept kept(self, ids, residuals, PyBytesRange::Access::kRead);
            self.write(kept.span(), reinterpret_cast<const float*>(kept.residuals.data()));
          },
          py::arg("ids"), py::arg("residuals"))
      .def(
          "copy",
          [](const RowResiduals& self, const py::object& ids, const py::object& residuals,
             const py::object& ages) {
            const Saved to(self, ids, residuals, ages, PyBytesRange::Access::kWrite);
            expect_bytes("ids", self.num_rows() * sizeof(uint64_t), to.kept.ids.size());
            self.copy(reinterpret_cast<uint64_t*>(to.kept.ids.data()),
                      reinterpret_cast<float*>(to.kept.residuals.data()),
                      reinterpret_cast<uint32_t*>(to.ages.data()));
          },
          py::arg("ids"), py::arg("residuals"), py::arg("ages"))
      .def(
          "load",
          [](RowResiduals& self, const py::object& ids, const py::object& residuals,
             const py::object& ages) {
            const Saved from(self, ids, residuals, ages, PyBytesRange::Access::kRead);
            if (self.num_rows() != 0) {
              throw Error(ErrorCode::BAD_ARGUMENT, "there are residuals already");
            }
            self.load(from.kept.span(), reinterpret_cast<const float*>(from.kept.residuals.data()),
                      reinterpret_cast<const uint32_t*>(from.ages.data()));
          },
          py::arg("ids"), py::arg("residuals"), py::arg("ages"));
}

// Memory for the rows of grouped ids, and for what is said of each.
struct CachedRows {
  CachedRows(const RowCache& self, const GroupedIds& grouped, const py::object& given_rows,
             const py::object& given_changes, PyBytesRange::Access access)
      : rows(given_rows, PyBytesRange::Access::kWrite), changes(given_changes, access) {
    if (grouped.begins().size() != self.num_partitions() + 1) throw py::index_error();
    expect_bytes("rows", grouped.ids().size() * self.row_bytes(), rows.size());
    expect_bytes("changes", grouped.ids().size() * sizeof(uint32_t), changes.size());
  }
  std::byte* row(const RowCache& self, size_t i) const {
    return rows.data() + i * self.row_bytes();
  }
  uint32_t* change(size_t i) const { return reinterpret_cast<uint32_t*>(changes.data()) + i; }

  PyBytesRange rows;
  PyBytesRange changes;
};

void read_cache(const RowCache& self, const GroupedIds& grouped, const py::object& rows,
                const py::object& changes) {
  const CachedRows to(self, grouped, rows, changes, PyBytesRange::Access::kWrite);
  const auto begins = grouped.begins();
  const py::gil_scoped_release no_gil;
  for (size_t p = 0; p < self.num_partitions(); ++p) {
    self.read(p, grouped.ids().subspan(begins[p], begins[p + 1] - begins[p]),
              to.row(self, begins[p]), to.change(begins[p]));
  }
}

// Ids [begin, end) of the grouped ones, which are of one partition, and how many bytes came of them.
using CachedPiece = std::tuple<size_t, size_t, size_t, size_t>;

void check_piece(const GroupedIds& grouped, size_t partition, size_t begin, size_t end) {
  const auto begins = grouped.begins();
  const bool is_there = partition + 1 < begins.size() && begins[partition] <= begin &&
                        begin <= end && end <= begins[partition + 1];
  if (!is_there) throw py::index_error();
}

py::bytes question_of_cache(const RowCache& self, const GroupedIds& grouped,
                            const std::vector<CachedPiece>& pieces, const py::object& changes) {
  const PyBytesRange given(changes);
  expect_bytes("changes", grouped.ids().size() * sizeof(uint32_t), given.size());
  size_t num_ids = 0;
  for (const auto& [partition, begin, end, num_bytes] : pieces) {
    check_piece(grouped, partition, begin, end);
    num_ids += end - begin;
  }
  std::string question;
  question.reserve(num_ids * (sizeof(uint64_t) + sizeof(uint32_t)) +
                   pieces.size() * sizeof(uint64_t));
  const auto add = [&](const auto* first, size_t count) {
    question.append(reinterpret_cast<const char*>(first), count * sizeof *first);
  };
  for (const auto& [partition, begin, end, num_bytes] : pieces) {
    add(grouped.ids().data() + begin, end - begin);
  }
  for (const auto& [partition, begin, end, num_bytes] : pieces) {
    const uint64_t marks = self.marks_of(partition);
    add(&marks, 1);
  }
  for (const auto& [partition, begin, end, num_bytes] : pieces) {
    add(reinterpret_cast<const uint32_t*>(given.data()) + begin, end - begin);
  }
  return {question.data(), question.size()};
}

bool take_into_cache(RowCache& self, const GroupedIds& grouped,
                     const std::vector<CachedPiece>& pieces, const py::object& rows,
                     const py::object& changes, const py::object& came) {
  const CachedRows to(self, grouped, rows, changes, PyBytesRange::Access::kRead);
  const PyBytesRange bytes(came);
  size_t num_came = 0;
  for (const auto& [partition, begin, end, num_bytes] : pieces) {
    check_piece(grouped, partition, begin, end);
    num_came += num_bytes;
  }
  expect_bytes("came", num_came, bytes.size());
  const py::gil_scoped_release no_gil;
  std::span<const std::byte> left = bytes.bytes();
  for (const auto& [partition, begin, end, num_bytes] : pieces) {
    if (!self.take(partition, grouped.ids().subspan(begin, end - begin),
                   {to.change(begin), end - begin}, left.first(num_bytes), to.row(self, begin))) {
      return false;
    }
    left = left.subspan(num_bytes);
  }
  return true;
}

std::unique_ptr<RowCache> make_cache(size_t row_bytes, size_t max_rows, size_t num_partitions) {
  const bool fits = row_bytes > 0 && row_bytes <= kMaxRowDim * sizeof(float) && max_rows > 0 &&
                    max_rows <= kMaxRows && num_partitions <= size_t{1} << kMaxPartitionBits;
  if (fits) return std::make_unique<RowCache>(row_bytes, max_rows, num_partitions);
  throw Error(ErrorCode::BAD_ARGUMENT, "no cache has " + std::to_string(max_rows) + " rows of " +
                                           std::to_string(row_bytes) + " bytes in " +
                                           std::to_string(num_partitions) + " partitions");
}

void bind_cache(py::module_& m) {
  py::class_<RowCache>(m, "RowCache", py::is_final())
      .def(py::init(&make_cache), py::arg("row_bytes"), py::arg("max_rows"),
           py::arg("num_partitions"))
      .def_static("record_bytes", &RowCache::record_bytes, py::arg("row_bytes"))
      .def_property_readonly("row_bytes", &RowCache::row_bytes)
      .def_property_readonly("num_rows", &RowCache::num_rows)
      .def_property_readonly("num_taken", &RowCache::num_taken)
      .def_property_readonly("num_unchanged", &RowCache::num_unchanged)
      .def("read", &read_cache, py::arg("grouped"), py::arg("rows"), py::arg("changes"))
      .def("question", &question_of_cache, py::arg("grouped"), py::arg("pieces"),
           py::arg("changes"))
      .def("take", &take_into_cache, py::arg("grouped"), py::arg("pieces"), py::arg("rows"),
           py::arg("changes"), py::arg("came"));
}

void scatter(const GroupedIds& self, const py::object& rows, uint32_t dim, const py::object& out,
             uint8_t dtype, uint8_t out_dtype) {
  check_dim(dim);
  const DType of = row_dtype(dtype);
  const DType out_of = kept_dtype(out_dtype);
  const PyBytesRange from(rows);
  const PyBytesRange to(out, PyBytesRange::Access::kWrite);
  expect_bytes("rows", self.ids().size() * encoded_row_bytes(of, dim), from.size());
  expect_bytes("out", self.num_given() * encoded_row_bytes(out_of, dim), to.size());
  const py::gil_scoped_release no_gil;
  self.scatter(from.data(), dim, of, out_of, to.data());
}

}  // namespace

void bind_rows(py::module_& m) {
  m.def(
      "row_record_bytes",
      [](uint8_t rule, uint32_t dim, uint8_t dtype, bool evicts) {
        check_dim(dim);
        return row_shape_of(RuleKind{rule}, dim, kept_dtype(dtype), evicts).record_bytes();
      },
      py::arg("rule"), py::arg("dim"), py::arg("dtype"), py::arg("evicts"));
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
  m.def(
      "overlay_rows",
      [](const py::object& base, const py::object& changes, size_t record_bytes,
         const py::object& records) {
        const PyBytesRange before(base);
        const PyBytesRange changed(changes);
        const PyBytesRange to(records, PyBytesRange::Access::kWrite);
        const py::gil_scoped_release no_gil;
        overlay_rows({before.data(), before.size()}, {changed.data(), changed.size()}, record_bytes,
                     {to.data(), to.size()});
      },
      py::arg("base"), py::arg("changes"), py::arg("record_bytes"), py::arg("records"));
  bind_residuals(m);
  py::class_<GroupedIds>(m, "GroupedIds", py::is_final())
      .def(py::init(&group), py::arg("ids"), py::arg("partition_bits"))
      .def("are", &are_grouped, py::arg("ids"))
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
      .def(
          "packed_bytes",
          [](const GroupedIds& self, uint32_t dim, uint8_t dtype) {
            return self.packed_bytes(dim, row_dtype(dtype));
          },
          py::arg("dim"), py::arg("dtype"))
      .def("pack", &pack, py::arg("gradients"), py::arg("dim"), py::arg("packed"), py::arg("dtype"),
           py::arg("residuals") = py::none())
      .def("scatter", &scatter, py::arg("rows"), py::arg("dim"), py::arg("out"), py::arg("dtype"),
           py::arg("out_dtype"));
  bind_cache(m);
}

}  // namespace psstore::bindings
