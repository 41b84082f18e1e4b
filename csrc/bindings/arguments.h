// Arguments of functions that are called often and do little, read as Python's vectorcall has them: what
// pybind11 makes of keywords, as much as it is, costs more than all the rest.
#pragma once

#include <array>
#include <cstddef>
#include <optional>

#include "bindings/common.h"

namespace psstore::bindings {

// What a function of Python returned.
template <typename T>
T stolen(PyObject* result) {
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<T>(result);
}

// For good.
inline PyObject* interned(const char* text) {
  return stolen<py::object>(PyUnicode_InternFromString(text)).release().ptr();
}

// What a function was given.
struct Arguments {
  PyObject* const* values;
  size_t num_positional;
  PyObject* keywords;  // a tuple of names, or null
};

// How a function is called: names of its parameters, of which the first may be given by position.
template <size_t num_parameters>
class Signature {
 public:
  using Given = std::array<py::handle, num_parameters>;

  Signature(const std::array<const char*, num_parameters>& names, size_t num_positional)
      : num_positional_(num_positional) {
    for (size_t i = 0; i < num_parameters; ++i) names_[i] = interned(names[i]);
  }

  // What was given for each parameter; None where nothing was. Nullopt: not called like this.
  std::optional<Given> read(const Arguments& arguments) const {
    const auto [values, num_given, keywords] = arguments;
    if (num_given > num_positional_) return std::nullopt;
    Given given;
    given.fill(Py_None);
    for (size_t i = 0; i < num_given; ++i) given[i] = values[i];
    const Py_ssize_t num_keywords = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
    for (Py_ssize_t i = 0; i < num_keywords; ++i) {
      const size_t place = position(PyTuple_GET_ITEM(keywords, i));
      if (place < num_given || place == num_parameters) return std::nullopt;
      given[place] = values[num_given + static_cast<size_t>(i)];
    }
    return given;
  }

 private:
  static bool same_text(PyObject* one, PyObject* other) {
    return one == other || PyUnicode_Compare(one, other) == 0;
  }
  // Names in a program are interned nearly always.
  size_t position(PyObject* name) const {
    for (size_t i = 0; i < num_parameters; ++i) {
      if (names_[i] == name) return i;
    }
    size_t i = 0;
    while (i < num_parameters && !same_text(names_[i], name)) ++i;
    return i;
  }

  std::array<PyObject*, num_parameters> names_;
  size_t num_positional_;
};

}  // namespace psstore::bindings
