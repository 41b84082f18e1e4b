// Behind Python's `FrameDecoder`: keeps alive what the kernel is told to write to.
#pragma once

#include <deque>
#include <memory>
#include <utility>

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
  bool mid_frame() const { return !put_back_.empty() || decoder_.mid_frame(); }

  // For those who take bytes without Python, and then leave the rest to it:
  FrameDecoder& decoder() { return decoder_; }
  // What it has accepted lies in `destination`, which is kept until the frame is complete.
  void keep(py::object destination) { destination_ = std::move(destination); }
  // What they fetched and leave to whoever calls next_frame.
  void put_back(std::shared_ptr<Frame> frame) { put_back_.push_back(std::move(frame)); }
  // What they fetched and give to Python themselves.
  void took(const Frame& frame) {
    if (frame.complete) release_destination();
  }

 protected:
  // The next frame as `next` finds it, after those that were put back.
  template <typename Next>
  std::shared_ptr<Frame> fetch(Next next) {
    if (!put_back_.empty()) {
      std::shared_ptr<Frame> frame = std::move(put_back_.front());
      put_back_.pop_front();
      return frame;
    }
    try {
      std::shared_ptr<Frame> frame = next();
      if (frame != nullptr) took(*frame);
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
  std::deque<std::shared_ptr<Frame>> put_back_;
  py::object destination_ = py::none();  // of the payload in flight, if Python gave it
};

}  // namespace psstore::bindings
