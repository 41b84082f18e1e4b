// SliceTable, Frame and encode_frame for Python.
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/common.h"
#include "wire/encoder.h"
#include "wire/frame.h"

namespace psstore::bindings {
namespace {

// ---- SliceTable -------------------------------------------------------------------------------------

SliceEntry make_entry(py::handle row) {
  try {
    const auto [key, num_bytes, dtype] = row.cast<std::tuple<Key, uint32_t, uint8_t>>();
    if (is_dtype(DType{dtype})) {
      return {.key = key, .num_bytes = num_bytes, .dtype = DType{dtype}};
    }
  } catch (const py::cast_error&) {
    // Said below, with the row.
  }
  throw Error(ErrorCode::BAD_ARGUMENT,
              "a slice is (key in 64 bits, num_bytes in 32, dtype number), not " +
                  py::repr(row).cast<std::string>());
}

SliceTable make_table(const py::iterable& rows) {
  std::vector<SliceEntry> entries;
  for (const py::handle row : rows) entries.push_back(make_entry(row));
  return SliceTable(std::move(entries));
}

// One field of every entry, as a Python list of numbers.
template <auto field>
py::list column(const SliceTable& table) {
  py::list values(table.size());
  for (size_t i = 0; i < table.size(); ++i) values[i] = static_cast<uint64_t>(table[i].*field);
  return values;
}

bool has_status(const SliceTable& table, uint8_t status) {
  return std::ranges::any_of(
      table, [=](const SliceEntry& entry) { return static_cast<uint8_t>(entry.status) == status; });
}

// A copy of the table with one field of every entry replaced.
template <auto field, typename Value>
SliceTable with_column(const SliceTable& table, const std::vector<Value>& values) {
  if (values.size() != table.size()) {
    throw std::invalid_argument(std::to_string(values.size()) + " values for " +
                                std::to_string(table.size()) + " slices");
  }
  std::vector<SliceEntry> entries(table.begin(), table.end());
  for (size_t i = 0; i < entries.size(); ++i) entries[i].*field = values[i];
  return SliceTable(std::move(entries));
}

SliceTable select(const SliceTable& table, const std::vector<size_t>& positions) {
  std::vector<SliceEntry> entries;
  entries.reserve(positions.size());
  for (const size_t position : positions) {
    if (position >= table.size()) {
      throw py::index_error("position " + std::to_string(position) + " of a table of " +
                            std::to_string(table.size()));
    }
    entries.push_back(table[position]);
  }
  return SliceTable(std::move(entries));
}

void bind_slice_table(py::module_& m) {
  py::class_<SliceTable>(m, "SliceTable", py::is_final())
      .def(py::init(&make_table), py::arg("entries"))
      .def("__len__", &SliceTable::size)
      .def("__bytes__", [](const SliceTable& self) { return py::bytes(self.wire_bytes()); })
      .def_property_readonly("payload_bytes", &SliceTable::payload_bytes)
      .def("keys", &column<&SliceEntry::key>)
      .def("versions", &column<&SliceEntry::version>)
      .def("num_bytes", &column<&SliceEntry::num_bytes>)
      .def("dtypes", &column<&SliceEntry::dtype>)
      .def("statuses", &column<&SliceEntry::status>)
      .def("parts", &column<&SliceEntry::part>)
      .def("first_failure",
           [](const SliceTable& self) -> std::optional<std::pair<size_t, int>> {
             const std::optional<size_t> position = first_failure(self);
             if (!position) return std::nullopt;
             return std::pair{*position, static_cast<int>(self[*position].status)};
           })
      .def("has_status", &has_status, py::arg("status"))
      .def("with_versions", &with_column<&SliceEntry::version, uint64_t>, py::arg("versions"))
      .def("with_parts", &with_column<&SliceEntry::part, uint16_t>, py::arg("parts"))
      .def("select", &select, py::arg("positions"));
}

// ---- Frame ------------------------------------------------------------------------------------------

py::object payload_of(const Frame& frame) {
  if (!frame.payload) return py::none();
  return wrap_buffer(frame.payload, /*writable=*/false);
}

// A read-only property for a field of the header.
template <typename Field>
auto header_field(Field Header::* field) {
  return [field](const Frame& frame) { return frame.header.*field; };
}

void bind_frame(py::module_& m) {
  py::class_<Frame, std::shared_ptr<Frame>>(m, "Frame", py::is_final())
      .def_property_readonly("op", [](const Frame& self) { return int(self.header.op); })
      .def_property_readonly("flags", header_field(&Header::flags))
      .def_property_readonly("shared", [](const Frame& self) { return self.header.is_shared(); })
      .def_property_readonly("request", header_field(&Header::request))
      .def_property_readonly("round", header_field(&Header::round))
      .def_property_readonly("rank", header_field(&Header::rank))
      .def_property_readonly("incarnation", header_field(&Header::incarnation))
      .def_property_readonly("sequence", header_field(&Header::sequence))
      .def_property_readonly("payload_bytes", header_field(&Header::payload_bytes))
      .def_readonly("table", &Frame::table)
      .def_property_readonly("body", [](const Frame& self) { return py::bytes(self.body); })
      .def_readonly("complete", &Frame::complete)
      .def_property_readonly("payload", &payload_of);
}

// ---- encode_frame -----------------------------------------------------------------------------------

py::bytes encode(uint8_t op, uint16_t flags, uint64_t request, uint64_t round, uint32_t rank,
                 uint32_t incarnation, uint64_t sequence, const SliceTable* table,
                 const py::object& body, uint64_t payload_bytes,
                 std::optional<uint32_t> payload_crc) {
  const PyBytesRange body_range(body);
  FrameParts parts{.op = Op{op},
                   .shared = (flags & kFlagShared) != 0,
                   .request = request,
                   .round = round,
                   .rank = rank,
                   .incarnation = incarnation,
                   .sequence = sequence,
                   .body = body_range.bytes(),
                   .payload_bytes = payload_bytes,
                   .payload_crc = payload_crc};
  if (table != nullptr) parts.table = table->entries();
  const bool says_checksum = (flags & kFlagChecksum) != 0;
  if ((flags & ~kKnownFlags) != 0 || (says_checksum && !payload_crc) ||
      (parts.shared && payload_crc)) {
    throw Error(ErrorCode::BAD_ARGUMENT,
                "flags " + std::to_string(flags) +
                    ": FLAG_CHECKSUM needs payload_crc, FLAG_SHARED has none, others do not exist");
  }
  check_parts(parts);
  const auto size = static_cast<Py_ssize_t>(parts.encoded_bytes());
  auto encoded = py::reinterpret_steal<py::bytes>(PyBytes_FromStringAndSize(nullptr, size));
  if (!encoded) throw py::error_already_set();
  encode_frame(parts, reinterpret_cast<std::byte*>(PyBytes_AS_STRING(encoded.ptr())));
  return encoded;
}

}  // namespace

void bind_wire(py::module_& m) {
  bind_slice_table(m);
  bind_frame(m);
  m.def("encode_frame", &encode, py::arg("op"), py::kw_only(), py::arg("flags") = 0,
        py::arg("request") = 0, py::arg("round") = 0, py::arg("rank") = 0,
        py::arg("incarnation") = 0, py::arg("sequence") = 0, py::arg("table") = py::none(),
        py::arg("body") = py::bytes(), py::arg("payload_bytes") = 0,
        py::arg("payload_crc") = py::none());
}

}  // namespace psstore::bindings
