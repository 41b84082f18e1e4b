// FrameDecoder for Python: keeps alive what the kernel is told to write to.
//
// The GIL stays held: a call does at most one pass over what one read brought, which is shorter than
// handing the GIL over. Only feed, whose size the caller chooses, releases it.
#include "bindings/decoder.h"

namespace psstore::bindings {

void bind_decoder(py::module_& m) {
  using namespace py::literals;
  py::class_<PyDecoder>(m, "FrameDecoder")
      .def(py::init<uint32_t, uint64_t>(), py::kw_only(), "max_body_bytes"_a = kMaxBodyBytes,
           "max_payload_bytes"_a = kMaxPayloadBytes)
      .def("set_limits", &PyDecoder::set_limits, py::kw_only(), "max_body_bytes"_a,
           "max_payload_bytes"_a)
      .def(
          "get_buffer", [](PyDecoder& self, py::ssize_t) { return self.get_buffer(); },
          "sizehint"_a, py::pos_only())
      .def("buffer_updated", &PyDecoder::buffer_updated, "num_bytes"_a, py::pos_only())
      .def("feed", &PyDecoder::feed, "data"_a, py::pos_only())
      .def("next_frame", &PyDecoder::next_frame)
      .def("accept", &PyDecoder::accept, "destination"_a, py::pos_only())
      .def("discard", &PyDecoder::discard)
      .def_property_readonly("mid_frame", &PyDecoder::mid_frame);
}

}  // namespace psstore::bindings
