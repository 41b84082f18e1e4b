// Where the values of a caller's array lie, found without Python code: the fast path of pushes and pulls.
//
// It knows numpy arrays and torch tensors that lie in main memory, row-major without gaps, in this
// machine's byte order. Whatever else there is (lists, views with strides, tensors of a device or of
// another class) it does not know, and says so: client/arrays.py knows the rest, and what to say of misfits.
#pragma once

#include <pybind11/numpy.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/common.h"
#include "core/types.h"

namespace psstore::bindings {

// What an array has to be.
struct ArrayForm {
  DType dtype;
  std::vector<int64_t> shape;
};

struct ArrayMemory {
  std::byte* data;
  size_t num_bytes;
  py::object owner;  // keeps the memory alive
};

// Of a one-dimensional array of bytes. Raises ValueError if it is none, or has gaps, or can't be written to.
ArrayMemory flat_memory(const py::array& bytes, bool writable);

// What a capsule of DLPack says of an array, on whatever device: its address, shape, dtype, and whether it is
// row-major without gaps. Raises ValueError for something else than such a capsule.
using DLPackArray = std::tuple<uint64_t, std::vector<int64_t>, std::string, bool>;
DLPackArray dlpack_array(const py::object& capsule);

// Finds the memory of arrays, one after the other. Needs the GIL.
class ArrayReader {
 public:
  // `writable`: the arrays are to be written to.
  explicit ArrayReader(bool writable) : writable_(writable) {}

  // None if the array is not known, or not exactly of that form.
  std::optional<ArrayMemory> memory(py::handle array, const ArrayForm& form);

 private:
  std::optional<ArrayMemory> tensor_memory(py::handle tensor, const ArrayForm& form);
  bool is_tensor(py::handle object);
  void find_torch();

  const bool writable_;
  // Of torch, if the program has imported it; looked up when the first object is no numpy array.
  bool searched_ = false;
  py::object tensor_type_;
  py::object parameter_type_;
  py::object to_dlpack_;
};

}  // namespace psstore::bindings
