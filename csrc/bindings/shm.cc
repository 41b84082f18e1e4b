// Shared memory for Python: files go in and out as numbers of open files, frames by reference.
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/common.h"
#include "bindings/memory.h"
#include "shm/client_memory.h"
#include "shm/push_arena.h"
#include "shm/value_arena.h"
#include "wire/frame.h"

namespace psstore::bindings {
namespace {

// ---- the shard's side -----------------------------------------------------------------------------

// Gives the frame its payload, before anything else is done with it: when the frame is gone, whatever
// became of it, the client learns that the memory is free.
void attach_payload(PushArena& arena, Frame& frame) {
  frame.payload = arena.range_of(frame.table.entries(), frame.header.request);
}

// ---- the client's side ----------------------------------------------------------------------------

void read(const ClientMemory& memory, const SliceTable& table, const Segments& destination) {
  if (!destination.writable()) {
    throw Error(ErrorCode::BAD_ARGUMENT, "Segments to receive into need writable=True");
  }
  const py::gil_scoped_release no_gil;
  memory.read(table.entries(), destination.ranges());
}

bool has_indices(const SliceTable& table) {
  return std::any_of(table.begin(), table.end(),
                     [](const SliceEntry& entry) { return entry.dtype == DType::kTopK; });
}

// The table, saying where the slices lie now; None: they have to go over the stream.
std::optional<SliceTable> write(ClientMemory& memory, const SliceTable& table,
                                const Segments& payload, uint64_t request) {
  if (payload.num_bytes() < kPushBlockBytes || has_indices(table)) return std::nullopt;
  std::vector<SliceEntry> entries(table.begin(), table.end());
  const py::gil_scoped_release no_gil;
  const std::optional<uint64_t> begin = memory.write(payload.ranges(), request);
  if (!begin) return std::nullopt;
  uint64_t offset = *begin;
  for (SliceEntry& entry : entries) {
    entry.offset = offset;
    offset += entry.num_bytes;
  }
  return SliceTable(std::move(entries));
}

}  // namespace

void bind_shm(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> no_gil;

  py::classh<ValueArena>(m, "ValueArena", py::is_final())
      .def(py::init<>())
      .def("fileno", [](const ValueArena& self) { return self.readonly_file().get(); });

  py::classh<PushArena>(m, "PushArena", py::is_final())
      .def(py::init(&PushArena::create), py::arg("num_bytes"))
      .def("filenos",
           [](const PushArena& self) {
             return py::make_tuple(self.file().get(), self.control_file().get());
           })
      .def("seal", &PushArena::seal)
      .def("attach_payload", &attach_payload, py::arg("frame"), no_gil);

  m.def("machine_memory_bytes", &machine_memory_bytes);

  py::class_<ClientMemory>(m, "ClientMemory", py::is_final())
      .def(py::init<int, int, int>(), py::kw_only(), py::arg("values"), py::arg("pushes"),
           py::arg("control"))
      .def("read", &read, py::arg("table"), py::arg("destination"))
      .def("write", &write, py::arg("table"), py::arg("payload"), py::arg("request"));
}

}  // namespace psstore::bindings
