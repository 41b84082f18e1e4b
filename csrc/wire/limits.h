// Every limit on what one frame may say, with its unit and its reason. A length is held against its
// limit before a byte is allocated for it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/errors.h"

namespace psstore {

// Slice descriptors in one frame. 4096 × 32 bytes = 128 KiB of table: ResNet-50 (161 tensors) and
// GPT-2 XL (580) fit in one frame many times over, and what a header can make us allocate stays small.
inline constexpr uint32_t kMaxSlices = 4096;

// Bytes of one control body. CREATED is the largest: about 210 bytes per tensor of 16 slices, so 16 MiB
// are over 70,000 tensors in one call.
inline constexpr uint32_t kMaxBodyBytes = 16u << 20;

// Bytes of one payload. A frame is received, checked and applied as a whole: 64 MiB hold a link of
// 10 Gbit/s for 54 ms, and the header's cost is gone long before that.
inline constexpr uint64_t kMaxPayloadBytes = 64ull << 20;

// Bytes of a body (and, separately, of a table) before the peer has proved that it has the token; no
// payload at all. HELLO and AUTH need less than 300.
inline constexpr uint32_t kPreAuthMaxBytes = 4096;

// Bytes of the decoder's own buffer: what one read can bring of a payload of many small ranges. Half of a
// small second-level cache, so that they are copied out of it while they are there. Memory that is never
// written to costs nothing: a server's connections receive payloads in one range each.
inline constexpr size_t kHeadBufferBytes = 256u << 10;

// Bytes that one read can bring of anything else: many small frames, or a header and the first part of a
// payload that is then received in place. 64 KiB are about what a socket hands out at once (Linux: tcp_rmem
// starts at 128 KiB, half of it usable).
inline constexpr size_t kFrameReadBytes = 64u << 10;

// A payload range with at least this much missing is received in place; what is smaller goes through
// the head buffer, where one system call can bring many ranges and the next header.
inline constexpr size_t kDirectReceiveBytes = 64u << 10;

// What one decoder lets its peer announce: tighter before the handshake is over than after.
struct FrameLimits {
  uint32_t max_body_bytes = kMaxBodyBytes;
  uint64_t max_payload_bytes = kMaxPayloadBytes;
};

}  // namespace psstore
