// Changes for Python: readers apply them to what they have.
#include "changes/changes.h"

#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings/common.h"

namespace psstore::bindings {
namespace {

using Access = PyBytesRange::Access;

uint64_t num_elems_of(size_t item_bytes, uint64_t num_bytes) {
  if (!has_changes_of(item_bytes) || num_bytes % item_bytes != 0) {
    throw Error(ErrorCode::SIZE_MISMATCH, std::to_string(num_bytes) + " bytes are no elements of " +
                                              std::to_string(item_bytes) +
                                              " bytes; an element has 2, 4 or 8");
  }
  return num_bytes / item_bytes;
}

void check_changes(size_t item_bytes, const PyBytesRange& payload, uint64_t num_elems) {
  if (are_changes(item_bytes, payload.bytes(), num_elems)) return;
  throw Error(ErrorCode::BAD_ARGUMENT, std::to_string(payload.size()) +
                                           " bytes are no changes of " + std::to_string(num_elems) +
                                           " elements of " + std::to_string(item_bytes) + " bytes");
}

py::object as_bytes(std::optional<size_t> num_bytes, const std::vector<std::byte>& memory) {
  if (!num_bytes) return py::none();
  return py::bytes(reinterpret_cast<const char*>(memory.data()), *num_bytes);
}

py::object encode(size_t item_bytes, const py::object& before, const py::object& after) {
  const PyBytesRange from(before);
  const PyBytesRange to(after);
  const uint64_t num_elems = num_elems_of(item_bytes, to.size());
  if (from.size() != to.size()) {
    throw Error(ErrorCode::SIZE_MISMATCH, "before has " + std::to_string(from.size()) +
                                              " bytes and after has " + std::to_string(to.size()));
  }
  std::vector<uint64_t> marks(num_mark_words(num_elems));
  std::vector<std::byte> memory(to.size());
  std::optional<size_t> num_bytes;
  {
    const py::gil_scoped_release release;
    mark_changes(item_bytes, from.data(), to.data(), num_elems, marks.data());
    num_bytes = encode_changes(item_bytes, marks.data(), to.data(), num_elems, memory);
  }
  return as_bytes(num_bytes, memory);
}

bool are(size_t item_bytes, const py::object& payload, uint64_t num_elems) {
  num_elems_of(item_bytes, 0);
  return are_changes(item_bytes, PyBytesRange(payload).bytes(), num_elems);
}

void apply(size_t item_bytes, const py::object& payload, const py::object& elements) {
  const PyBytesRange changes(payload);
  const PyBytesRange to(elements, Access::kWrite);
  const uint64_t num_elems = num_elems_of(item_bytes, to.size());
  const py::gil_scoped_release release;
  check_changes(item_bytes, changes, num_elems);
  apply_changes(item_bytes, changes.bytes(), to.data());
}

}  // namespace

void bind_changes(py::module_& m) {
  m.def("encode_changes", &encode, py::arg("item_bytes"), py::arg("before"), py::arg("after"));
  m.def("are_changes", &are, py::arg("item_bytes"), py::arg("payload"), py::arg("num_elems"));
  m.def("apply_changes", &apply, py::arg("item_bytes"), py::arg("payload"), py::arg("elements"));
}

}  // namespace psstore::bindings
