// Turns psstore::Error into the exception class that psstore.errors has for its code, and what the system
// said no to into OSError.
#include <cerrno>
#include <system_error>

#include "bindings/common.h"

namespace psstore::bindings {
namespace {

// psstore.errors is imported at the first error: it imports nothing of ours, but it lies in the package
// whose import loads this extension.
void set_python_error(const Error& error) {
  const py::object exception = py::module_::import("psstore.errors")
                                   .attr("from_code")(static_cast<int>(error.code()), error.what());
  PyErr_SetObject(py::type::handle_of(exception).ptr(), exception.ptr());
}

}  // namespace

void register_error_translation() {
  py::register_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const std::system_error& error) {
      errno = error.code().value();
      PyErr_SetFromErrno(PyExc_OSError);
    } catch (const Error& error) {
      try {
        set_python_error(error);
      } catch (py::error_already_set& import_failed) {
        import_failed.restore();
      }
    }
  });
}

}  // namespace psstore::bindings
