// The Python object FrameMap: which bytes of which array go into which frame.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "bindings/array_memory.h"
#include "bindings/memory.h"

namespace psstore::bindings {

class FrameMap {
 public:
  // Bytes [begin, end) of the array at `position`.
  using Range = std::tuple<size_t, size_t, size_t>;
  using FormTuple = std::tuple<uint8_t, std::vector<int64_t>>;

  FrameMap(const std::vector<FormTuple>& forms, std::vector<std::vector<Range>> frames);

  size_t num_frames() const { return frames_.size(); }
  // The memory of each frame. None: look at the arrays one by one, in Python.
  std::optional<std::vector<Segments>> of_arrays(const py::sequence& arrays, bool writable) const;
  std::vector<Segments> of_bytes(const std::vector<py::array>& arrays, bool writable) const;

 private:
  std::vector<Segments> cut(const std::vector<ArrayMemory>& memories, bool writable) const;

  std::vector<ArrayForm> forms_;
  std::vector<std::vector<Range>> frames_;
  std::vector<size_t> num_bytes_;  // of each array, as the frames have them
};

}  // namespace psstore::bindings
