// FrameDecoder for Python: keeps alive what the kernel is told to write to.
//
// The GIL stays held: a call does at most one pass over what one read brought, which is shorter than
// handing the GIL over. Only feed, whose size the caller chooses, releases it.
#include "bindings/decoder.h"

namespace psstore::bindings {

py::object PyDecoder::get_buffer() {
  const FrameDecoder::Window window = decoder_.writable();
  if (!window.in_destination) return make_writable_view(decoder_.head_buffer(), window.bytes);
  if (destination_.is_none()) return make_writable_view(decoder_.destination(), window.bytes);
  return make_writable_view(destination_, window.bytes);
}

void PyDecoder::feed(const py::object& data) {
  const PyBytesRange range(data);
  const py::gil_scoped_release released;
  decoder_.feed(range.bytes());
}

void PyDecoder::accept(const py::object& destination) {
  if (py::isinstance<PyBuffer>(destination)) {
    accept_buffer(destination.cast<const PyBuffer&>());
  } else if (py::isinstance<Segments>(destination)) {
    accept_segments(destination.cast<const Segments&>());
  } else {
    throw py::type_error("accept takes a Buffer or Segments");
  }
  destination_ = destination;
}

void PyDecoder::accept_buffer(const PyBuffer& buffer) {
  if (!buffer.writable()) {
    throw Error(ErrorCode::BAD_ARGUMENT, "that Buffer holds a payload already");
  }
  decoder_.accept(buffer.ref());
}

void PyDecoder::accept_segments(const Segments& segments) {
  if (!segments.writable()) {
    throw Error(ErrorCode::BAD_ARGUMENT, "Segments to receive into need writable=True");
  }
  decoder_.accept(segments.ranges());
}

void PyDecoder::release_destination() {
  if (py::isinstance<PyBuffer>(destination_)) destination_.cast<PyBuffer&>().seal();
  destination_ = py::none();
}

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
