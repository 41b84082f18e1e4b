#include "bindings/array_memory.h"

#include <pybind11/numpy.h>

#include <algorithm>
#include <span>
#include <string>
#include <utility>

#include "bindings/dlpack.h"

namespace psstore::bindings {
namespace {

// ---- numpy ------------------------------------------------------------------------------------------

// numpy's type numbers (numpy/ndarraytypes.h: NPY_FLOAT, NPY_DOUBLE, NPY_HALF); 0 is bool.
int numpy_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return 11;
    case DType::kFloat64: return 12;
    case DType::kFloat16: return 23;
    default: return 0;  // numpy has no such dtype
  }
}

// Whether it may be written to is for the caller to ask.
ArrayMemory memory_of(const py::array& array) {
  auto* const data = static_cast<std::byte*>(const_cast<void*>(array.data()));
  return {data, static_cast<size_t>(array.nbytes()), array};
}

std::optional<ArrayMemory> numpy_memory(const py::array& array, const ArrayForm& form,
                                        bool writable) {
  const std::span shape(array.shape(), static_cast<size_t>(array.ndim()));
  const py::dtype dtype = array.dtype();
  const int type = numpy_type(form.dtype);
  // What the memory of another class means, as of one with a mask, arrays.py asks.
  const bool is_plain = Py_TYPE(array.ptr()) == py::detail::npy_api::get().PyArray_Type_;
  const bool fits = is_plain && type != 0 && dtype.num() == type && dtype.byteorder() == '=' &&
                    (array.flags() & py::array::c_style) != 0 &&
                    std::ranges::equal(shape, form.shape) && (!writable || array.writeable());
  if (!fits) return std::nullopt;
  return memory_of(array);
}

// ---- torch ------------------------------------------------------------------------------------------

bool is_of(const DLDataType& type, DType wanted) {
  if (type.lanes != 1) return false;
  switch (wanted) {
    case DType::kFloat32: return type.code == kDLFloat && type.bits == 32;
    case DType::kFloat64: return type.code == kDLFloat && type.bits == 64;
    case DType::kBFloat16: return type.code == kDLBFloat && type.bits == 16;
    case DType::kFloat16: return type.code == kDLFloat && type.bits == 16;
    default: return false;
  }
}

std::string name_of(const DLDataType& type) {
  if (is_of(type, DType::kFloat32)) return "float32";
  if (is_of(type, DType::kFloat64)) return "float64";
  if (is_of(type, DType::kBFloat16)) return "bfloat16";
  if (is_of(type, DType::kFloat16)) return "float16";
  return "DLPack " + std::to_string(type.code) + " of " + std::to_string(type.bits) + " bits";
}

// A dimension of size 1 may have any stride, and so may all of an array without elements.
bool is_row_major(const DLTensor& tensor) {
  if (tensor.strides == nullptr) return true;
  int64_t expected = 1;
  bool dense = true;
  for (int32_t i = tensor.num_dims - 1; i >= 0; --i) {
    if (tensor.shape[i] == 0) return true;
    dense = dense && (tensor.shape[i] == 1 || tensor.strides[i] == expected);
    expected *= tensor.shape[i];
  }
  return dense;
}

size_t num_elems(const ArrayForm& form) {
  size_t product = 1;
  for (const int64_t size : form.shape) product *= static_cast<size_t>(size);
  return product;
}

// One whose memory was freed, or which torch knows to be zeros, has none.
bool fits(const DLTensor& tensor, const ArrayForm& form) {
  const std::span shape(tensor.shape, static_cast<size_t>(tensor.num_dims));
  if (tensor.data == nullptr && num_elems(form) > 0) return false;
  return tensor.device.type == kDLMainMemory && is_of(tensor.dtype, form.dtype) &&
         std::ranges::equal(shape, form.shape) && is_row_major(tensor);
}

// The result of a call into torch; null if that raised, which arrays.py will meet, too.
py::object result_of(PyObject* object) {
  if (object == nullptr) PyErr_Clear();
  return py::reinterpret_steal<py::object>(object);
}

// Its values are the negatives of what its memory holds; DLPack does not say so.
bool is_negated(py::handle tensor) {
  static PyObject* const name = PyUnicode_InternFromString("is_neg");
  const py::object negated = result_of(PyObject_CallMethodNoArgs(tensor.ptr(), name));
  return negated.ptr() != Py_False;
}

}  // namespace

ArrayMemory flat_memory(const py::array& bytes, bool writable) {
  const bool flat = bytes.ndim() == 1 && bytes.itemsize() == 1 &&
                    (bytes.flags() & py::array::c_style) != 0 && (!writable || bytes.writeable());
  if (!flat)
    throw py::value_error("expected bytes without gaps, which may be written to for a pull");
  return memory_of(bytes);
}

DLPackArray dlpack_array(const py::object& capsule) {
  void* const pointer = PyCapsule_GetPointer(capsule.ptr(), "dltensor");
  if (pointer == nullptr) throw py::error_already_set();
  const auto& tensor = *static_cast<const DLTensor*>(pointer);
  const auto address = reinterpret_cast<uint64_t>(tensor.data) + tensor.byte_offset;
  std::vector<int64_t> shape(tensor.shape, tensor.shape + tensor.num_dims);
  return {address, std::move(shape), name_of(tensor.dtype), is_row_major(tensor)};
}

std::optional<ArrayMemory> ArrayReader::memory(py::handle array, const ArrayForm& form) {
  if (py::isinstance<py::array>(array)) {
    return numpy_memory(py::reinterpret_borrow<py::array>(array), form, writable_);
  }
  return is_tensor(array) ? tensor_memory(array, form) : std::nullopt;
}

std::optional<ArrayMemory> ArrayReader::tensor_memory(py::handle tensor, const ArrayForm& form) {
  if (is_negated(tensor)) return std::nullopt;
  py::object capsule = result_of(PyObject_CallOneArg(to_dlpack_.ptr(), tensor.ptr()));
  if (!capsule) return std::nullopt;
  void* const pointer = PyCapsule_GetPointer(capsule.ptr(), "dltensor");
  if (pointer == nullptr) throw py::error_already_set();
  const auto& described = *static_cast<const DLTensor*>(pointer);
  if (!fits(described, form)) return std::nullopt;
  const size_t num_bytes = num_elems(form) * dtype_bytes(form.dtype);
  return ArrayMemory{described.data + described.byte_offset, num_bytes, std::move(capsule)};
}

// A class derived from them may mean something else by its memory.
bool ArrayReader::is_tensor(py::handle object) {
  if (!searched_) find_torch();
  const auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()));
  return to_dlpack_ && (type == tensor_type_.ptr() || type == parameter_type_.ptr());
}

void ArrayReader::find_torch() {
  searched_ = true;
  const py::dict modules = py::module_::import("sys").attr("modules");
  if (!modules.contains("torch.utils.dlpack"))
    return;  // the last that `import torch` needs of these
  const py::module_ torch = modules["torch"];
  tensor_type_ = torch.attr("Tensor");
  parameter_type_ = torch.attr("nn").attr("Parameter");
  to_dlpack_ = torch.attr("utils").attr("dlpack").attr("to_dlpack");
}

}  // namespace psstore::bindings
