// Any bytes, in reads of any size: the decoder gives frames or one ProtocolError, and stays within its memory.
//
// The first byte chooses the size of the reads, the second what happens to payloads, the rest is read.
#include <cstdlib>

#include "fuzz_targets.h"
#include "wire_support.h"

namespace psstore::testing {
namespace {

// A peer can make us hold a whole frame, never more.
constexpr FrameLimits kFuzzLimits{.max_body_bytes = 1u << 16, .max_payload_bytes = 1u << 18};

void check(bool holds) {
  if (!holds) std::abort();
}

bool blames_the_peer(ErrorCode code) {
  return code >= ErrorCode::BAD_MAGIC && code <= ErrorCode::BAD_SIGNATURE;
}

void answer(FrameDecoder& decoder, BufferPool& pool, const Frame& frame, int choice) {
  check(frame.header.payload_bytes <= kFuzzLimits.max_payload_bytes);
  switch (choice) {
    case 0: return decoder.discard();
    case 1: return decoder.accept(pool.allocate(frame.header.payload_bytes));
  }
  static Bytes memory(kFuzzLimits.max_payload_bytes);
  std::vector<std::span<std::byte>> ranges;
  size_t used = 0;
  for (const SliceEntry& entry : frame.table) {
    ranges.push_back(std::span(memory).subspan(used, entry.num_bytes));
    used += entry.num_bytes;
  }
  decoder.accept(ranges);
}

}  // namespace

void fuzz_decoder(std::span<const std::byte> bytes) {
  if (bytes.size() < 2) return;
  const size_t max_read = std::to_integer<size_t>(bytes[0]) * 37 + 1;
  const int choice = std::to_integer<int>(bytes[1]) % 3;
  const auto pool = BufferPool::create(0);
  FrameDecoder decoder(kFuzzLimits);
  try {
    deliver(decoder, bytes.subspan(2), max_read, [&](Frame& frame) {
      check(frame.table.size() <= kMaxSlices && frame.body.size() <= kFuzzLimits.max_body_bytes);
      if (!frame.complete) answer(decoder, *pool, frame, choice);
    });
  } catch (const Error& error) {
    check(blames_the_peer(error.code()));
  }
}

}  // namespace psstore::testing
