// Encodings for Python: clients encode what they push and decode what they pull.
#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "bindings/common.h"
#include "kernels/kernel_set.h"

namespace psstore::bindings {
namespace {

using Access = PyBytesRange::Access;

DType checked_encoding(int number, bool may_be_half) {
  const auto encoding = static_cast<DType>(number);
  const bool is_known =
      number >= 0 && number <= 255 && (may_be_half ? can_encode(encoding) : is_encoding(encoding));
  if (!is_known) {
    throw Error(ErrorCode::DTYPE_MISMATCH,
                std::to_string(number) + " is not the number of an encoding: int8, sign" +
                    (may_be_half ? ", topk or half precision" : " or topk"));
  }
  return encoding;
}

void check_kept(uint64_t num_elems, uint64_t num_kept) {
  if (num_kept > num_elems) {
    throw Error(ErrorCode::BAD_ARGUMENT, "k is " + std::to_string(num_kept) + ", of only " +
                                             std::to_string(num_elems) + " elements");
  }
}

uint64_t num_floats(const PyBytesRange& range, const char* what) {
  if (range.size() % sizeof(float) != 0) {
    throw Error(
        ErrorCode::SIZE_MISMATCH,
        std::string(what) + " has " + std::to_string(range.size()) + " bytes, not a multiple of 4");
  }
  return range.size() / sizeof(float);
}

uint64_t checked_bytes(int encoding, uint64_t num_elems, uint64_t num_kept) {
  check_kept(num_elems, num_kept);
  return encoded_bytes(checked_encoding(encoding, /*may_be_half=*/true), num_elems, num_kept);
}

uint64_t encode_slice(int encoding, const py::object& source, const py::object& residual,
                      const py::object& out, uint64_t num_kept,
                      const std::optional<std::string>& instruction_set) {
  const KernelSet& kernels = kernels_or_best(instruction_set);
  const PyBytesRange from(source);
  const uint64_t num_elems = num_floats(from, "source");
  const uint64_t num_bytes = checked_bytes(encoding, num_elems, num_kept);
  const PyBytesRange to(out, Access::kWrite);
  std::optional<PyBytesRange> rest;
  if (!residual.is_none()) rest.emplace(residual, Access::kWrite);
  if (to.size() < num_bytes || (rest && rest->size() != from.size())) {
    throw Error(ErrorCode::SIZE_MISMATCH,
                "of " + std::to_string(num_elems) + " floats: expected at least " +
                    std::to_string(num_bytes) + " bytes in out, got " + std::to_string(to.size()) +
                    "; a residual has the bytes of the source");
  }
  const ToEncode what{.encoding = static_cast<DType>(encoding),
                      .source = from.data(),
                      .residual = rest ? rest->data() : nullptr,
                      .num_elems = static_cast<int64_t>(num_elems),
                      .num_kept = static_cast<int64_t>(num_kept),
                      .payload = to.data()};
  const py::gil_scoped_release release;
  kernels.encode(what);
  return num_bytes;
}

void decode_slice(int encoding, const py::object& payload, const py::object& out,
                  const std::optional<std::string>& instruction_set) {
  const KernelSet& kernels = kernels_or_best(instruction_set);
  const PyBytesRange from(payload);
  const PyBytesRange to(out, Access::kWrite);
  const uint64_t num_elems = num_floats(to, "out");
  const Encoded encoded{checked_encoding(encoding, /*may_be_half=*/false), from.data(), from.size(),
                        num_elems};
  const py::gil_scoped_release release;
  if (!is_encoded_size(encoded.encoding, num_elems, encoded.num_bytes)) {
    throw Error(ErrorCode::SIZE_MISMATCH, std::to_string(encoded.num_bytes) + " bytes can't be " +
                                              std::to_string(num_elems) +
                                              " elements in that encoding");
  }
  if (!is_well_formed(encoded)) {
    throw Error(ErrorCode::BAD_ARGUMENT,
                "the indices do not ascend, or are not all below " + std::to_string(num_elems));
  }
  kernels.decode(encoded, to.data());
}

}  // namespace

void bind_codec(py::module_& m) {
  m.def("encoded_bytes", &checked_bytes, py::arg("encoding"), py::arg("num_elems"),
        py::arg("k") = 0);
  m.def("encode_slice", &encode_slice, py::arg("encoding"), py::arg("source"), py::arg("residual"),
        py::arg("out"), py::arg("k") = 0, py::kw_only(), py::arg("instruction_set") = py::none());
  m.def("decode_slice", &decode_slice, py::arg("encoding"), py::arg("payload"), py::arg("out"),
        py::kw_only(), py::arg("instruction_set") = py::none());
}

}  // namespace psstore::bindings
