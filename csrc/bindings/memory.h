// The Python objects that payloads lie in: Buffer (the pool's memory) and Segments (other people's).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "bindings/common.h"
#include "table/gather.h"

namespace psstore::bindings {

// Work of fewer bytes keeps the GIL: giving it up and getting it back costs more than the work.
inline constexpr size_t kReleaseGilBytes = 64u << 10;

// Behind Python's `Buffer`.
class PyBuffer {
 public:
  PyBuffer(BufferRef ref, bool writable) : ref_(std::move(ref)), writable_(writable) {}

  const BufferRef& ref() const { return ref_; }
  bool writable() const { return writable_; }
  // What it holds is received: views made from now on are read-only.
  void seal() { writable_ = false; }

 private:
  BufferRef ref_;
  bool writable_;
};

// Behind Python's `Segments`.
class Segments {
 public:
  explicit Segments(bool writable) : writable_(writable) {}
  // Each an object with the buffer protocol.
  Segments(const py::sequence& ranges, bool writable);
  Segments(Segments&&) = default;
  Segments& operator=(Segments&&) = delete;

  // For those who know where memory lies: `owner` keeps that of the ranges added after it.
  void reserve(size_t num_ranges) { ranges_.reserve(num_ranges); }
  void keep(py::object owner) { owners_.push_back(std::move(owner)); }
  void add(std::span<std::byte> range) {
    ranges_.push_back(range);
    num_bytes_ += range.size();
  }

  size_t size() const { return ranges_.size(); }
  size_t num_bytes() const { return num_bytes_; }
  bool writable() const { return writable_; }

  // To be written to only if writable().
  std::span<const std::span<std::byte>> ranges() const { return ranges_; }
  // Needs no GIL.
  uint32_t checksum() const;
  // `self` is the Python object of this: views of large ranges keep it alive.
  py::list pieces(const py::object& self) const;

 private:
  std::vector<std::span<std::byte>> ranges_;
  std::vector<PyBytesRange> exports_;  // of the objects that were given,
  std::vector<py::object> owners_;     // and what else keeps the ranges
  size_t num_bytes_ = 0;
  bool writable_;
};

// A view of the piece, which holds it.
inline py::object view_of(Piece piece) {
  const std::span<const std::byte> bytes(piece.buffer->data(), piece.num_bytes);
  return make_readonly_view(std::move(piece.buffer), bytes);
}

// Must run before the first view is made.
void create_memory_owner_type(const py::module_& m);

}  // namespace psstore::bindings
