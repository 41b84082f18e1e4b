// memoryviews over C++ memory. A reply has one per value, so the exporter behind them is a plain type of
// the C API: a pybind11 class would also be entered into and found in its registry of instances.
#include <memory>
#include <new>
#include <utility>

#include "bindings/memory.h"

namespace psstore::bindings {
namespace {

// Exports one range of bytes and keeps its owner alive; Python sees it as `memoryview.obj` only.
struct MemoryOwner {
  PyObject header;
  ViewOwner owner;
  std::byte* data;
  size_t size;
  bool readonly;
};

PyTypeObject* memory_owner_type = nullptr;

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
  auto* const memory = reinterpret_cast<MemoryOwner*>(self);
  return PyBuffer_FillInfo(view, self, memory->data, static_cast<Py_ssize_t>(memory->size),
                           memory->readonly ? 1 : 0, flags);
}

void deallocate(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  std::destroy_at(&reinterpret_cast<MemoryOwner*>(self)->owner);
  type->tp_free(self);
  Py_DECREF(type);
}

py::object make_view(ViewOwner owner, std::byte* data, size_t size, bool readonly) {
  PyObject* const self = memory_owner_type->tp_alloc(memory_owner_type, 0);
  if (self == nullptr) throw py::error_already_set();
  auto* const memory = reinterpret_cast<MemoryOwner*>(self);
  new (&memory->owner) ViewOwner(std::move(owner));
  memory->data = data;
  memory->size = size;
  memory->readonly = readonly;
  const auto exporter = py::reinterpret_steal<py::object>(self);
  PyObject* const view = PyMemoryView_FromObject(self);
  if (view == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(view);
}

}  // namespace

void create_memory_owner_type(const py::module_& m) {
  PyType_Slot slots[] = {
      {Py_tp_dealloc, reinterpret_cast<void*>(deallocate)},
      {Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)},
      {0, nullptr},
  };
  PyType_Spec spec = {"psstore._core._MemoryOwner", sizeof(MemoryOwner), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  PyObject* const type = PyType_FromModuleAndSpec(m.ptr(), &spec, nullptr);
  if (type == nullptr) throw py::error_already_set();
  memory_owner_type = reinterpret_cast<PyTypeObject*>(type);
}

py::object make_readonly_view(ViewOwner owner, std::span<const std::byte> bytes) {
  // Nobody writes through it: the exporter says that it is read-only.
  auto* const data = const_cast<std::byte*>(bytes.data());
  return make_view(std::move(owner), data, bytes.size(), true);
}

py::object make_writable_view(ViewOwner owner, std::span<std::byte> bytes) {
  return make_view(std::move(owner), bytes.data(), bytes.size(), false);
}

}  // namespace psstore::bindings
