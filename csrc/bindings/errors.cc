// Turns psstore::Error into the exception class that psstore.errors has for its code, and what the system
// said no to into OSError.
#include <cerrno>
#include <new>
#include <system_error>

#include "bindings/common.h"

namespace psstore::bindings {
namespace {

// psstore.errors is imported at the first error: it imports nothing of ours, but it lies in the package
// whose import loads this extension.
py::object exception_of(const Error& error) {
  return py::module_::import("psstore.errors")
      .attr("from_code")(static_cast<int>(error.code()), error.what());
}

py::object exception_of(const std::system_error& error) {
  return py::reinterpret_borrow<py::object>(PyExc_OSError)(error.code().value(), error.what());
}

// What the system has no memory for is refused as what a budget has none for.
py::object exception_of(const std::bad_alloc&) {
  return exception_of(
      Error(ErrorCode::OUT_OF_MEMORY,
            "the system has no memory left for this; ask for less at a time, or give the "
            "process more"));
}

void set_python_error(const py::object& exception) {
  PyErr_SetObject(py::type::handle_of(exception).ptr(), exception.ptr());
}

}  // namespace

py::object exception_of(const std::exception_ptr& pending) {
  try {
    std::rethrow_exception(pending);
  } catch (const std::system_error& error) {
    return exception_of(error);
  } catch (const Error& error) {
    return exception_of(error);
  } catch (const std::bad_alloc& error) {
    return exception_of(error);
  } catch (const std::exception& error) {
    return py::reinterpret_borrow<py::object>(PyExc_RuntimeError)(error.what());
  }
}

void raise_in_python(const std::exception_ptr& pending) {
  try {
    std::rethrow_exception(pending);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (...) {
    try {
      set_python_error(exception_of(pending));
    } catch (py::error_already_set& import_failed) {
      import_failed.restore();
    }
  }
}

void register_error_translation() {
  py::register_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const std::system_error& error) {
      errno = error.code().value();
      PyErr_SetFromErrno(PyExc_OSError);
    } catch (const Error&) {
      raise_in_python(pending);
    } catch (const std::bad_alloc&) {
      raise_in_python(pending);
    }
  });
}

}  // namespace psstore::bindings
