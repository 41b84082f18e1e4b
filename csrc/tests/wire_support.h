// What the wire tests share: building streams of frames, and cutting them into reads of any size.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <string_view>
#include <vector>

#include "core/crc32c.h"
#include "wire/decoder.h"
#include "wire/encoder.h"

namespace psstore::testing {

using Bytes = std::vector<std::byte>;

inline Bytes random_bytes(size_t size, uint32_t seed = 1) {
  std::mt19937 random(seed);
  Bytes bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

inline void append(Bytes& bytes, std::span<const std::byte> more) {
  bytes.insert(bytes.end(), more.begin(), more.end());
}

// A whole frame, without the encoder's checks. `sizes`: bytes of each slice, which make the payload.
struct TestFrame {
  Op op = Op::kPUSH;
  std::vector<uint32_t> sizes = {};
  Bytes body = {};
  Bytes payload = {};
  bool checksum = true;
  std::function<void(Header&)> forge = [](Header&) {};
  std::function<void(SliceEntry&)> forge_entry = [](SliceEntry&) {};

  static TestFrame with_slices(std::vector<uint32_t> slice_sizes) {
    TestFrame frame;
    size_t payload_bytes = 0;
    for (const uint32_t size : slice_sizes) payload_bytes += size;
    frame.sizes = std::move(slice_sizes);
    frame.payload = random_bytes(payload_bytes);
    return frame;
  }

  Bytes wire() const {
    std::vector<SliceEntry> table;
    for (const uint32_t size : sizes) {
      table.push_back({.key = table.size(), .num_bytes = size});
      forge_entry(table.back());
    }
    FrameParts parts{.op = op, .table = table, .body = body, .payload_bytes = payload.size()};
    if (checksum) parts.payload_crc = crc32c(payload);
    Bytes bytes(parts.encoded_bytes());
    encode_frame(parts, bytes.data());
    Header header;
    std::memcpy(&header, bytes.data(), kHeaderBytes);
    forge(header);
    header.header_crc = compute_header_crc(header);
    std::memcpy(bytes.data(), &header, kHeaderBytes);
    append(bytes, payload);
    return bytes;
  }
};

// Plays the kernel: `stream` comes in reads of at most `max_read` bytes, and `after_read` is called after each.
inline void receive(FrameDecoder& decoder, std::span<const std::byte> stream, size_t max_read,
                    const std::function<void()>& after_read) {
  while (!stream.empty()) {
    const std::span<std::byte> window = decoder.writable().bytes;
    const size_t size = std::min({window.size(), max_read, stream.size()});
    std::memcpy(window.data(), stream.data(), size);
    decoder.written(size);
    stream = stream.subspan(size);
    after_read();
  }
}

// The same, with `on_frame` called for each frame, incomplete ones too.
inline void deliver(FrameDecoder& decoder, std::span<const std::byte> stream, size_t max_read,
                    const std::function<void(Frame&)>& on_frame) {
  receive(decoder, stream, max_read, [&] {
    while (const std::shared_ptr<Frame> frame = decoder.next_frame()) on_frame(*frame);
  });
}

}  // namespace psstore::testing
