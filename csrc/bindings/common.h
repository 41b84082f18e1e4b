// What every binding file shares: the bind functions, error translation, and the buffer protocol in
// both directions (memory of Python objects for C++, memory of C++ for Python).
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <exception>
#include <span>
#include <variant>

#include "core/buffer.h"
#include "core/errors.h"

namespace psstore::bindings {

namespace py = pybind11;

// One per file of this folder; module.cc calls them in this order.
void bind_constants(py::module_& m);     // limits, OPS, ERROR_CODES, DTYPES, RULES
void bind_memory(py::module_& m);        // Buffer, Segments, crc32c
void bind_frame_map(py::module_& m);     // FrameMap
void bind_wire(py::module_& m);          // SliceTable, Frame, encode_frame
void bind_decoder(py::module_& m);       // FrameDecoder
void bind_tls(py::module_& m);           // TlsContext, TlsSession
void bind_session(py::module_& m);       // CarriedDecisions, ClientRequest, ClientSession
void bind_calls(py::module_& m);         // FramePlan, CallPlan, CallTerms, StartingParts, Call
void bind_call_driver(py::module_& m);   // CallDriver
void bind_direct_calls(py::module_& m);  // DirectCalls
void bind_shm(py::module_& m);           // ValueArena, PushArena, ClientMemory
void bind_device(py::module_& m);        // Device, Queue, Fence, pinned and device memory
void bind_liveness(py::module_& m);      // Heartbeat
void bind_rows(py::module_& m);          // GroupedIds
void bind_server(py::module_& m);        // DataService, ServerProtocol, Poller
void bind_table(py::module_& m);         // Decision, Shard
void bind_kernels(py::module_& m);       // instruction_sets, reduce_update, CUDA
void bind_codec(py::module_& m);         // encode_slice, decode_slice
void bind_changes(py::module_& m);       // encode_changes, are_changes, apply_changes
void bind_batches(py::module_& m);       // SliceBatch, queue_...

// psstore::Error becomes the class of its code in psstore.errors.
void register_error_translation();
// The exception that Python would see, without raising it.
py::object exception_of(const std::exception_ptr& error);
// For functions that Python calls without pybind11 in between.
void raise_in_python(const std::exception_ptr& error);

// The bytes of a Python object for as long as this lives: one C-contiguous range, by reference.
// Needs the GIL to be made and destroyed, not to be read. Raises what the object raises: BufferError
// if it is read-only, ValueError or BufferError if it is not contiguous, TypeError if it has no bytes.
class PyBytesRange {
 public:
  enum class Access { kRead, kWrite };

  explicit PyBytesRange(py::handle object, Access access = Access::kRead) {
    const int flags = access == Access::kWrite ? PyBUF_WRITABLE : PyBUF_SIMPLE;
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw py::error_already_set();
  }
  PyBytesRange(PyBytesRange&& other) noexcept : view_(other.view_) { other.view_.obj = nullptr; }
  PyBytesRange& operator=(PyBytesRange&&) = delete;
  PyBytesRange(const PyBytesRange&) = delete;
  PyBytesRange& operator=(const PyBytesRange&) = delete;
  ~PyBytesRange() { PyBuffer_Release(&view_); }  // does nothing once moved from

  std::byte* data() const { return static_cast<std::byte*>(view_.buf); }
  size_t size() const { return static_cast<size_t>(view_.len); }
  std::span<const std::byte> bytes() const { return {data(), size()}; }
  // REQUIRES: made with Access::kWrite.
  std::span<std::byte> writable_bytes() const { return {data(), size()}; }

 private:
  Py_buffer view_{};
};

// Who keeps the memory of a view alive: a pool buffer or a Python object.
using ViewOwner = std::variant<BufferRef, py::object>;

// A memoryview of bytes over memory that `owner` keeps alive; the view holds the owner until it, and
// everything made from it, is gone. Cheap: two small Python objects, no copy.
py::object make_readonly_view(ViewOwner owner, std::span<const std::byte> bytes);
py::object make_writable_view(ViewOwner owner, std::span<std::byte> bytes);

// The Python `Buffer` of a pool buffer. `writable`: it is still to be filled; false: a finished value.
py::object wrap_buffer(BufferRef buffer, bool writable);

}  // namespace psstore::bindings
