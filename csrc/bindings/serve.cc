// Desk and Port for Python: what they can answer never becomes an object of Python's.
#include "serve/port.h"

#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <variant>

#include "bindings/decoder.h"

namespace psstore::bindings {
namespace {

py::object part_of(Replies::Part part) {
  if (auto* piece = std::get_if<Piece>(&part)) return view_of(std::move(*piece));
  return py::bytes(std::get<std::string>(part));
}

class PyPort : public PyDecoder {
 public:
  PyPort(Desk& desk, uint32_t max_body_bytes, uint64_t max_payload_bytes)
      : PyDecoder(max_body_bytes, max_payload_bytes), port_(decoder(), desk) {}

  void open(std::string client, bool wants_checksum) {
    port_.open({std::move(client), wants_checksum});
  }
  void attach(uint32_t rank, uint32_t incarnation) { port_.attach({rank, incarnation}); }

  // Without the GIL: it is long if values are.
  std::shared_ptr<Frame> next_frame() {
    return fetch([this] {
      const py::gil_scoped_release no_gil;
      return port_.next_frame();
    });
  }

  py::list take_replies() {
    py::list parts;
    for (Replies::Part& part : port_.replies().take()) parts.append(part_of(std::move(part)));
    return parts;
  }

 private:
  Port port_;
};

}  // namespace

void bind_serve(py::module_& m) {
  using namespace py::literals;
  py::class_<Desk>(m, "Desk", py::is_final())
      .def("close", &Desk::close)
      .def("watch_writes", &Desk::watch_writes, "watched"_a)
      .def(
          "remember", [](Desk& self, const Frame& frame) { self.remember(frame.body); }, "frame"_a)
      .def("newest_incarnation", &Desk::newest_incarnation, "rank"_a);

  py::class_<PyPort, PyDecoder>(m, "Port", py::is_final())
      .def(py::init<Desk&, uint32_t, uint64_t>(), "desk"_a, py::kw_only(),
           "max_body_bytes"_a = kMaxBodyBytes, "max_payload_bytes"_a = kMaxPayloadBytes,
           py::keep_alive<1, 2>())
      .def("open", &PyPort::open, py::kw_only(), "client"_a, "wants_checksum"_a)
      .def("attach", &PyPort::attach, "rank"_a, "incarnation"_a)
      .def("next_frame", &PyPort::next_frame)
      .def("take_replies", &PyPort::take_replies);
}

}  // namespace psstore::bindings
