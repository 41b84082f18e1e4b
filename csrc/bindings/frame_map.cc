#include "bindings/frame_map.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <utility>

namespace psstore::bindings {
FrameMap::FrameMap(const std::vector<FormTuple>& forms, std::vector<std::vector<Range>> frames)
    : frames_(std::move(frames)), num_bytes_(forms.size()) {
  for (const auto& [dtype, shape] : forms) forms_.push_back({DType{dtype}, shape});
  for (const std::vector<Range>& frame : frames_) {
    for (const auto& [position, begin, end] : frame) {
      if (position >= forms.size() || begin > end) {
        throw py::value_error("a frame has a range that is in none of the arrays");
      }
      num_bytes_[position] = std::max(num_bytes_[position], end);
    }
  }
}

std::optional<std::vector<Segments>> FrameMap::of_arrays(const py::sequence& arrays,
                                                         bool writable) const {
  if (arrays.size() != forms_.size()) return std::nullopt;
  ArrayReader reader(writable);
  std::vector<ArrayMemory> memories;
  memories.reserve(forms_.size());
  for (size_t i = 0; i < forms_.size(); ++i) {
    const py::object array = arrays[i];
    std::optional<ArrayMemory> memory = reader.memory(array, forms_[i]);
    if (!memory || memory->num_bytes != num_bytes_[i]) return std::nullopt;
    memories.push_back(std::move(*memory));
  }
  return cut(memories, writable);
}

std::vector<Segments> FrameMap::of_bytes(const std::vector<py::array>& arrays,
                                         bool writable) const {
  if (arrays.size() != forms_.size()) {
    throw py::value_error(std::to_string(arrays.size()) + " arrays where " +
                          std::to_string(forms_.size()) + " belong");
  }
  std::vector<ArrayMemory> memories;
  memories.reserve(arrays.size());
  for (size_t i = 0; i < arrays.size(); ++i) {
    memories.push_back(flat_memory(arrays[i], writable));
    if (memories.back().num_bytes != num_bytes_[i]) {
      throw py::value_error("array " + std::to_string(i) + " has " +
                            std::to_string(memories.back().num_bytes) + " bytes, expected " +
                            std::to_string(num_bytes_[i]));
    }
  }
  return cut(memories, writable);
}

std::vector<Segments> FrameMap::cut(const std::vector<ArrayMemory>& memories, bool writable) const {
  std::vector<Segments> made;
  made.reserve(frames_.size());
  for (const std::vector<Range>& frame : frames_) {
    Segments& segments = made.emplace_back(writable);
    segments.reserve(frame.size());
    size_t last = memories.size();
    for (const auto& [position, begin, end] : frame) {
      const ArrayMemory& memory = memories[position];
      // The slices of one array stand together: one reference is enough.
      if (position != last) segments.keep(memory.owner);
      segments.add({memory.data + begin, end - begin});
      last = position;
    }
  }
  return made;
}

void bind_frame_map(py::module_& m) {
  py::class_<FrameMap>(m, "FrameMap", py::is_final())
      .def(py::init<const std::vector<FrameMap::FormTuple>&,
                    std::vector<std::vector<FrameMap::Range>>>(),
           py::arg("forms"), py::arg("frames"))
      .def("of_arrays", &FrameMap::of_arrays, py::arg("arrays"), py::kw_only(), py::arg("writable"))
      .def("of_bytes", &FrameMap::of_bytes, py::arg("arrays"), py::kw_only(), py::arg("writable"));
}

}  // namespace psstore::bindings
