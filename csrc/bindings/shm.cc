// Shared memory for Python: files go in and out as numbers of open files, frames by reference.
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/common.h"
#include "bindings/memory.h"
#include "device/device_arena.h"
#include "shm/borrowed_device.h"
#include "shm/client_memory.h"
#include "shm/push_arena.h"
#include "shm/seen_memory.h"
#include "shm/value_arena.h"
#include "shm/value_view.h"
#include "wire/frame.h"

namespace psstore::bindings {
namespace {

// ---- the client's side ----------------------------------------------------------------------------

void read(const ClientMemory& memory, const SliceTable& table, const Segments& destination) {
  if (!destination.writable()) {
    throw Error(ErrorCode::BAD_ARGUMENT, "Segments to receive into need writable=True");
  }
  const py::gil_scoped_release no_gil;
  memory.read(table.entries(), destination.ranges());
}

std::unique_ptr<ValueView> make_value_view(const std::vector<std::pair<size_t, size_t>>& given) {
  std::vector<ValueView::Part> parts;
  parts.reserve(given.size());
  for (const auto& [begin, num_bytes] : given) parts.push_back({begin, num_bytes});
  return std::make_unique<ValueView>(std::move(parts));
}

void show(ValueView& view, const ClientMemory& memory, const SliceTable& table, size_t first) {
  const py::gil_scoped_release no_gil;
  view.show(memory, table.entries(), first);
}

// Of the view's own memory, to receive into.
Segments own(const py::object& self, size_t first, size_t count) {
  Segments segments(true);
  segments.keep(self);
  for (const auto& range : self.cast<ValueView&>().own(first, count)) segments.add(range);
  return segments;
}

// The table, saying where the slices lie now; None: they have to go over the stream.
std::optional<SliceTable> write(ClientMemory& memory, const SliceTable& table,
                                const Segments& payload, uint64_t request) {
  const py::gil_scoped_release no_gil;
  auto entries = memory.place(table.entries(), payload.ranges(), request);
  if (!entries) return std::nullopt;
  return SliceTable(std::move(*entries));
}

// ---- on a device ------------------------------------------------------------------------------------

// Addresses of ranges and their sizes.
using DeviceRanges = std::vector<std::pair<uint64_t, size_t>>;

std::vector<DeviceRange> ranges_of(const DeviceRanges& given) {
  std::vector<DeviceRange> ranges;
  ranges.reserve(given.size());
  for (const auto& [pointer, num_bytes] : given) {
    ranges.push_back({reinterpret_cast<std::byte*>(pointer), num_bytes});
  }
  return ranges;
}

void read_on_device(const BorrowedDevice& memory, device::Queue& queue, const SliceTable& table,
                    const DeviceRanges& targets) {
  const py::gil_scoped_release no_gil;
  memory.read(queue, table.entries(), ranges_of(targets));
}

void write_on_device(PushRoom& room, device::Queue& queue, const DeviceRanges& sources) {
  const py::gil_scoped_release no_gil;
  room.write(queue, ranges_of(sources));
}

void bind_device_sharing(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> no_gil;

  py::classh<device::SharedBlock>(m, "SharedBlock", py::is_final())
      .def_property_readonly("number", &device::SharedBlock::number)
      .def_property_readonly("address", &device::SharedBlock::address)
      .def_property_readonly("nbytes", &device::SharedBlock::num_bytes)
      .def_property_readonly(
          "handle", [](const device::SharedBlock& self) { return py::bytes(self.handle()); });

  py::classh<BorrowedDevice>(m, "BorrowedDevice", py::is_final())
      .def(py::init<std::shared_ptr<device::Device>>(), py::arg("device"))
      .def(
          "add_block",
          [](BorrowedDevice& self, uint64_t address, size_t num_bytes, const py::bytes& handle) {
            const std::string bytes = handle;
            const py::gil_scoped_release released;
            self.add_block(address, num_bytes, bytes);
          },
          py::arg("address"), py::arg("num_bytes"), py::arg("handle"))
      .def("add_own_block", &BorrowedDevice::add_own_block, py::arg("block"), no_gil)
      .def("read", &read_on_device, py::arg("queue"), py::arg("table"), py::arg("targets"));

  py::classh<PushRoom>(m, "PushRoom", py::is_final())
      .def_property_readonly("nbytes", &PushRoom::num_bytes)
      .def("write", &write_on_device, py::arg("queue"), py::arg("sources"))
      .def(
          "send",
          [](PushRoom& self, const SliceTable& table, uint64_t request) {
            return SliceTable(laid_out(table.entries(), self.send(request)));
          },
          py::arg("table"), py::arg("request"), no_gil);

  py::classh<DevicePushes>(m, "DevicePushes", py::is_final())
      .def(py::init<std::shared_ptr<BorrowedDevice>, int, uint64_t, size_t>(), py::arg("blocks"),
           py::kw_only(), py::arg("control"), py::arg("address"), py::arg("num_bytes"))
      .def_property_readonly("nbytes", &DevicePushes::num_bytes)
      .def("take", &DevicePushes::take, py::arg("num_bytes"), no_gil);
}

}  // namespace

void bind_shm(py::module_& m) {
  py::classh<ValueArena>(m, "ValueArena", py::is_final())
      .def(py::init<>())
      .def("fileno", [](const ValueArena& self) { return self.readonly_file().get(); });

  py::classh<PushArena>(m, "PushArena", py::is_final())
      .def(py::init(&PushArena::create), py::arg("num_bytes"))
      .def("filenos",
           [](const PushArena& self) {
             return py::make_tuple(self.file().get(), self.control_file().get());
           })
      .def_property_readonly("nbytes", &PushArena::num_bytes)
      .def("seal", &PushArena::seal);

  py::classh<SeenMemory>(m, "SeenMemory", py::is_final())
      .def(py::init(&SeenMemory::map), py::arg("file"), py::kw_only(), py::arg("address"));

  m.def("machine_memory_bytes", &machine_memory_bytes);

  py::class_<ClientMemory, std::shared_ptr<ClientMemory>>(m, "ClientMemory", py::is_final())
      .def(py::init<int, int, int>(), py::kw_only(), py::arg("values"), py::arg("pushes"),
           py::arg("control"))
      .def("read", &read, py::arg("table"), py::arg("destination"))
      .def("write", &write, py::arg("table"), py::arg("payload"), py::arg("request"))
      .def_property_readonly("num_reads", &ClientMemory::num_reads)
      .def_property_readonly("num_writes", &ClientMemory::num_writes);

  py::classh<ValueView>(m, "ValueView", py::buffer_protocol(), py::is_final())
      .def(py::init(&make_value_view), py::arg("parts"))
      .def_buffer([](const ValueView& self) {
        return py::buffer_info(reinterpret_cast<const uint8_t*>(self.data()),
                               static_cast<py::ssize_t>(self.num_bytes()));
      })
      .def_property_readonly("num_mappings", &ValueView::num_mappings)
      .def(
          "shown",
          [](const ValueView& self, const ClientMemory& memory, const SliceTable& table,
             size_t first) { return self.shown(memory, table.entries(), first); },
          py::arg("memory"), py::arg("table"), py::arg("first"))
      .def("show", &show, py::arg("memory"), py::arg("table"), py::arg("first"))
      .def("own", &own, py::arg("first"), py::arg("count"));

  bind_device_sharing(m);
}

}  // namespace psstore::bindings
