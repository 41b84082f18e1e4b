// Behind Python's `FrameDecoder`: keeps alive what the kernel is told to write to.
#pragma once

#include <memory>

#include "bindings/common.h"
#include "bindings/memory.h"
#include "wire/decoder.h"

namespace psstore::bindings {

class PyDecoder {
 public:
  PyDecoder(uint32_t max_body_bytes, uint64_t max_payload_bytes)
      : decoder_({.max_body_bytes = max_body_bytes, .max_payload_bytes = max_payload_bytes}) {}

  void set_limits(uint32_t max_body_bytes, uint64_t max_payload_bytes) {
    decoder_.set_limits({.max_body_bytes = max_body_bytes, .max_payload_bytes = max_payload_bytes});
  }

  // The view holds the memory's owner: it may outlive the payload and the decoder without dangling.
  py::object get_buffer();
  void buffer_updated(size_t num_bytes) { decoder_.written(num_bytes); }
  void feed(const py::object& data);
  std::shared_ptr<Frame> next_frame() {
    return fetch([this] { return decoder_.next_frame(); });
  }
  void accept(const py::object& destination);
  void discard() { decoder_.discard(); }
  bool mid_frame() const { return decoder_.mid_frame(); }

  FrameDecoder& decoder() { return decoder_; }

 protected:
  // The next frame as `next` finds it.
  template <typename Next>
  std::shared_ptr<Frame> fetch(Next next) {
    try {
      std::shared_ptr<Frame> frame = next();
      if (frame != nullptr && frame->complete) release_destination();
      return frame;
    } catch (const Error&) {
      destination_ = py::none();  // a broken decoder writes nowhere
      throw;
    }
  }

 private:
  void accept_buffer(const PyBuffer& buffer);
  void accept_segments(const Segments& segments);
  void release_destination();

  FrameDecoder decoder_;
  py::object destination_ = py::none();  // of the payload in flight, if Python gave it
};

}  // namespace psstore::bindings
