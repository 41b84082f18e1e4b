// Heartbeat for Python. Creation and stop() are quick; only stop() waits for another thread.
#include <cerrno>
#include <memory>
#include <string>
#include <system_error>

#include "bindings/common.h"
#include "liveness/heartbeat.h"

namespace psstore::bindings {
namespace {

std::unique_ptr<Heartbeat> make_heartbeat(int fd, const py::bytes& frame, double interval_s,
                                          std::shared_ptr<TlsSession> tls) {
  try {
    return std::make_unique<Heartbeat>(fd, std::string(frame), interval_s, std::move(tls));
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
    throw py::error_already_set();
  }
}

}  // namespace

void bind_liveness(py::module_& m) {
  py::class_<Heartbeat>(m, "Heartbeat", py::is_final())
      .def(py::init(&make_heartbeat), py::arg("fd"), py::arg("frame"), py::arg("interval_s"),
           py::arg("tls") = nullptr)
      .def_property_readonly("alive", &Heartbeat::alive)
      .def("stop", &Heartbeat::stop, py::call_guard<py::gil_scoped_release>());
}

}  // namespace psstore::bindings
