// Device, Queue, Fence, PinnedPool and DeviceMemory for Python, and arrays that come in DLPack's capsules.
//
// Addresses on a device are numbers: nothing here reads them but the device.
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/array_memory.h"
#include "bindings/common.h"
#include "bindings/memory.h"
#include "device/device.h"
#include "device/encoding.h"
#include "device/pieces.h"

namespace psstore::bindings {
namespace {

using device::Device;
using device::Fence;
using device::Queue;

// ---- memory -----------------------------------------------------------------------------------------

// Pinned host memory of a device.
class PinnedSource : public BlockSource {
 public:
  explicit PinnedSource(std::shared_ptr<Device> device) : device_(std::move(device)) {}
  std::byte* take(size_t num_bytes) noexcept override {
    try {
      return device_->allocate_pinned(num_bytes);
    } catch (const Error&) {
      return nullptr;  // the pool takes it from the heap, which is slower and no less right
    }
  }
  void give_back(std::byte* block, size_t) noexcept override { device_->free_pinned(block); }

 private:
  const std::shared_ptr<Device> device_;
};

class PinnedPool {
 public:
  PinnedPool(std::shared_ptr<Device> device, size_t max_idle_bytes)
      : pool_(BufferPool::create(max_idle_bytes,
                                 std::make_shared<PinnedSource>(std::move(device)))) {}

  // At least so many: what is smaller than a large block would be the heap's.
  PyBuffer allocate(size_t num_bytes) {
    return {pool_->allocate(std::max(num_bytes, kLargeBlockBytes)), /*writable=*/true};
  }
  size_t num_bytes() const { return pool_->bytes_in_use() + pool_->bytes_idle(); }

 private:
  const std::shared_ptr<BufferPool> pool_;
};

// Uninitialised memory of a device, freed with this object.
class DeviceMemory {
 public:
  DeviceMemory(std::shared_ptr<Device> device, size_t num_bytes)
      : device_(std::move(device)), data_(device_->allocate(num_bytes)), num_bytes_(num_bytes) {
    if (data_ == nullptr) {
      throw Error(ErrorCode::OUT_OF_MEMORY, "device " + device_->name() + " has no " +
                                                std::to_string(num_bytes) + " bytes left");
    }
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() { device_->free(data_); }

  uint64_t pointer() const { return reinterpret_cast<uint64_t>(data_); }
  size_t num_bytes() const { return num_bytes_; }

 private:
  const std::shared_ptr<Device> device_;
  std::byte* const data_;
  const size_t num_bytes_;
};

// ---- copies -----------------------------------------------------------------------------------------

void require_room(const PyBuffer& buffer, size_t num_bytes) {
  if (num_bytes > buffer.ref()->size()) {
    throw py::value_error("payloads of " + std::to_string(num_bytes) +
                          " bytes lie beyond the end of the buffer");
  }
}

// Where in the host's buffer, where on the device, and how many bytes.
using TransferPiece = std::tuple<size_t, uint64_t, size_t>;

// Calls `add(copies, host, device, num_bytes)` for each piece.
template <class Add>
CopyList copies_of(const PyBuffer& buffer, const std::vector<TransferPiece>& pieces, Add add) {
  Buffer& host = *buffer.ref();
  CopyList copies;
  for (const auto& [offset, pointer, num_bytes] : pieces) {
    if (offset > host.size() || num_bytes > host.size() - offset) {
      throw py::value_error("a piece lies beyond the end of the buffer");
    }
    add(copies, host.data() + offset, reinterpret_cast<void*>(pointer), num_bytes);
  }
  return copies;
}

void copy_out(Queue& queue, const PyBuffer& to, const std::vector<TransferPiece>& pieces) {
  const CopyList copies =
      copies_of(to, pieces, [](auto& list, void* host, void* on_device, size_t num_bytes) {
        list.add(host, on_device, num_bytes);
      });
  const py::gil_scoped_release no_gil;
  device::copy_pieces_out(queue, copies.pieces());
}

void copy_in(Queue& queue, const PyBuffer& from, const std::vector<TransferPiece>& pieces) {
  const CopyList copies =
      copies_of(from, pieces, [](auto& list, void* host, void* on_device, size_t num_bytes) {
        list.add(on_device, host, num_bytes);
      });
  const py::gil_scoped_release no_gil;
  device::copy_pieces_in(queue, copies.pieces());
}

// (encoding, elements, k, source, its dtype, lacked or 0, times what, lacking)
using GivenToSend = std::tuple<int, int64_t, int64_t, uint64_t, int, uint64_t, float, uint64_t>;

void encode_out(Queue& queue, const PyBuffer& to, const std::vector<GivenToSend>& given) {
  std::vector<device::ToSend> slices;
  slices.reserve(given.size());
  size_t num_bytes = 0;
  for (const auto& [encoding, elems, kept, source, dtype, lacked, scale, lacking] : given) {
    slices.push_back({.encoding = static_cast<DType>(encoding),
                      .num_elems = elems,
                      .num_kept = kept,
                      .source = reinterpret_cast<const void*>(source),
                      .dtype = static_cast<DType>(dtype),
                      .lacked = reinterpret_cast<const void*>(lacked),
                      .lacked_scale = scale,
                      .lacking = reinterpret_cast<void*>(lacking)});
    num_bytes += slices.back().payload_bytes();
  }
  require_room(to, num_bytes);
  const py::gil_scoped_release no_gil;
  device::encode_out(queue, to.ref()->data(), slices);
}

// (dtype, elements, offset, value, its dtype)
using GivenToDecode = std::tuple<int, int64_t, size_t, uint64_t, int>;

void decode_in(Queue& queue, const PyBuffer& from, size_t num_bytes,
               const std::vector<GivenToDecode>& given) {
  std::vector<device::ToDecode> slices;
  slices.reserve(given.size());
  require_room(from, num_bytes);
  for (const auto& [dtype, elems, offset, value, to] : given) {
    slices.push_back({.dtype = static_cast<DType>(dtype),
                      .num_elems = elems,
                      .offset = offset,
                      .value = reinterpret_cast<void*>(value),
                      .to = static_cast<DType>(to)});
    const uint64_t size = encoded_bytes(slices.back().dtype, static_cast<uint64_t>(elems));
    if (offset > num_bytes || size > num_bytes - offset) {
      throw py::value_error("a payload lies beyond the end of what has come");
    }
  }
  const py::gil_scoped_release no_gil;
  device::decode_in(queue, from.ref()->data(), num_bytes, slices);
}

// (floats, elements, to, dtype)
using GivenToGiveOut = std::tuple<uint64_t, int64_t, uint64_t, int>;

void give_out(Queue& queue, const std::vector<GivenToGiveOut>& given) {
  std::vector<device::ToGiveOut> arrays;
  arrays.reserve(given.size());
  for (const auto& [floats, elems, to, dtype] : given) {
    arrays.push_back({.floats = reinterpret_cast<const void*>(floats),
                      .num_elems = elems,
                      .to = reinterpret_cast<void*>(to),
                      .dtype = static_cast<DType>(dtype)});
  }
  const py::gil_scoped_release no_gil;
  device::give_out(queue, arrays);
}

}  // namespace

void bind_device(py::module_& m) {
  using namespace py::literals;
  const py::call_guard<py::gil_scoped_release> no_gil;

  py::classh<Fence>(m, "Fence", py::is_final())
      .def("done", &Fence::done, no_gil)
      .def("wait", &Fence::wait, no_gil);

  py::classh<Queue>(m, "Queue", py::is_final())
      .def_property_readonly("stream", &Queue::stream)
      .def("record", &Queue::record, no_gil)
      .def("wait_for", &Queue::wait_for, "fence"_a, no_gil)
      .def("copy_out", &copy_out, "to"_a, "pieces"_a)
      .def("copy_in", &copy_in, "source"_a, "pieces"_a)
      .def("encode_out", &encode_out, "to"_a, "slices"_a)
      .def("decode_in", &decode_in, "source"_a, "num_bytes"_a, "slices"_a)
      .def("give_out", &give_out, "arrays"_a);

  py::classh<Device>(m, "Device", py::is_final())
      .def_property_readonly("name", &Device::name)
      .def_property_readonly("identity",
                             [](const Device& self) { return py::bytes(self.identity()); })
      .def("make_queue", &Device::make_queue, no_gil)
      .def("borrow_queue", &Device::borrow_queue, "stream"_a, no_gil);

  py::class_<PinnedPool>(m, "PinnedPool", py::is_final())
      .def(py::init<std::shared_ptr<Device>, size_t>(), "device"_a, py::kw_only(),
           "max_idle_bytes"_a)
      .def("allocate", &PinnedPool::allocate, "num_bytes"_a)
      .def_property_readonly("nbytes", &PinnedPool::num_bytes);

  py::class_<DeviceMemory>(m, "DeviceMemory", py::is_final())
      .def(py::init<std::shared_ptr<Device>, size_t>(), "device"_a, "num_bytes"_a)
      .def_property_readonly("pointer", &DeviceMemory::pointer)
      .def_property_readonly("nbytes", &DeviceMemory::num_bytes);

  m.def("open_device", &device::open_device, "name"_a, no_gil);
  m.def(
      "cuda_device_of",
      [](uint64_t pointer) { return device::cuda_device_of(reinterpret_cast<void*>(pointer)); },
      "pointer"_a, no_gil);
  m.def("dlpack_array", &dlpack_array, "capsule"_a);
}

}  // namespace psstore::bindings
