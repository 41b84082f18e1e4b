// SliceTable, Frame and encode_frame for Python.
#include <pybind11/stl.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/common.h"
#include "wire/encoder.h"
#include "wire/frame.h"
#include "wire/rows_asked.h"

namespace psstore::bindings {
namespace {

// ---- SliceTable -------------------------------------------------------------------------------------

SliceEntry make_entry(py::handle row) {
  try {
    const auto [key, num_bytes, dtype] = row.cast<std::tuple<Key, uint32_t, uint8_t>>();
    const DType of = dtype_of_changes(DType{dtype});
    const bool may_change =
        is_of_changes(DType{dtype}) && (dtype_bytes(of) != 0 || rows_travel_as(of));
    if (is_dtype(DType{dtype}) || is_rows_encoding(DType{dtype}) || may_change) {
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
      .def_property_readonly("carry",
                             [](const Frame& self) {
                               const std::string_view carry = carry_of(self);
                               return py::bytes(carry.data(), carry.size());
                             })
      .def_readonly("complete", &Frame::complete)
      .def_property_readonly("payload", &payload_of);
}

// ---- encode_frame -----------------------------------------------------------------------------------

// None stands for the default, which is nothing.
template <typename T>
T number(py::handle given) {
  if (given.is_none()) return {};
  const unsigned long long value = PyLong_AsUnsignedLongLong(given.ptr());
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  if (value > std::numeric_limits<T>::max()) {
    PyErr_Format(PyExc_OverflowError, "%llu has too many bits for a field of a header", value);
    throw py::error_already_set();
  }
  return static_cast<T>(value);
}

void check_flags(uint16_t flags, bool has_checksum) {
  const bool says_checksum = (flags & kFlagChecksum) != 0;
  const bool shared = (flags & kFlagShared) != 0;
  if ((flags & ~kKnownFlags) == 0 && (has_checksum || !says_checksum) &&
      !(shared && has_checksum)) {
    return;
  }
  throw Error(ErrorCode::BAD_ARGUMENT,
              "flags " + std::to_string(flags) +
                  ": FLAG_CHECKSUM needs payload_crc, FLAG_SHARED has none, others do not exist");
}

py::bytes encoded(const FrameParts& parts) {
  check_parts(parts);
  const auto size = static_cast<Py_ssize_t>(parts.encoded_bytes());
  auto made = stolen<py::bytes>(PyBytes_FromStringAndSize(nullptr, size));
  encode_frame(parts, reinterpret_cast<std::byte*>(PyBytes_AS_STRING(made.ptr())));
  return made;
}

py::bytes encode(const Arguments& arguments) {
  static const Signature<11> signature(
      {"op", "flags", "request", "round", "rank", "incarnation", "sequence", "table", "body",
       "payload_bytes", "payload_crc"},
      1);
  const auto given = signature.read(arguments);
  if (!given || (*given)[0].is_none()) throw py::type_error("not how encode_frame is called");
  const auto [op, flags, request, round, rank, incarnation, sequence, table, body, payload_bytes,
              payload_crc] = *given;
  const auto flag_bits = number<uint16_t>(flags);
  FrameParts parts{.op = Op{number<uint8_t>(op)},
                   .shared = (flag_bits & kFlagShared) != 0,
                   .request = number<uint64_t>(request),
                   .round = number<uint64_t>(round),
                   .rank = number<uint32_t>(rank),
                   .incarnation = number<uint32_t>(incarnation),
                   .sequence = number<uint64_t>(sequence),
                   .payload_bytes = number<uint64_t>(payload_bytes)};
  if (!payload_crc.is_none()) parts.payload_crc = number<uint32_t>(payload_crc);
  check_flags(flag_bits, parts.payload_crc.has_value());
  if (!table.is_none()) parts.table = table.cast<const SliceTable&>().entries();
  if (body.is_none()) return encoded(parts);
  const PyBytesRange body_range(body);
  parts.body = body_range.bytes();
  return encoded(parts);
}

PyObject* encode_entry(PyObject* /*module*/, PyObject* const* values, Py_ssize_t num_positional,
                       PyObject* keywords) {
  try {
    return encode({values, static_cast<size_t>(num_positional), keywords}).release().ptr();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (...) {
    raise_in_python(std::current_exception());
  }
  return nullptr;
}

void bind_encode_frame(py::module_& m) {
  static PyMethodDef method = {
      "encode_frame", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&encode_entry)),
      METH_FASTCALL | METH_KEYWORDS,
      "encode_frame(op: int, *, flags: int = 0, request: int = 0, round: int = 0, rank: int = 0, "
      "incarnation: int = 0, sequence: int = 0, table: object = None, body: bytes = b'', "
      "payload_bytes: int = 0, payload_crc: object = None) -> bytes"};
  m.attr(method.ml_name) = stolen<py::object>(PyCFunction_New(&method, nullptr));
}

}  // namespace

void bind_wire(py::module_& m) {
  bind_slice_table(m);
  bind_frame(m);
  bind_encode_frame(m);
}

}  // namespace psstore::bindings
