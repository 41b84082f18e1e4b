// Runs the fuzz target on seeded mutations of good streams, so that the sanitizers see it without
// libFuzzer too. Half of the mutated frames get right checksums again, to come past it.
#include <gtest/gtest.h>

#include "fuzz_targets.h"
#include "wire_support.h"

namespace psstore::testing {
namespace {

Bytes good_stream() {
  Bytes stream = TestFrame{.op = Op::kHELLO, .body = random_bytes(40)}.wire();
  append(stream, TestFrame::with_slices({4, 0, 300, 70'000}).wire());
  append(stream, TestFrame{.op = Op::kPULL, .sizes = {0, 0}}.wire());
  append(stream, TestFrame::with_slices({1, 2, 3}).wire());
  return stream;
}

void repair_frame_at(Bytes& stream, size_t offset) {
  if (offset + kHeaderBytes > stream.size()) return;
  Header header;
  std::memcpy(&header, stream.data() + offset, kHeaderBytes);
  header.header_crc = compute_header_crc(header);
  std::memcpy(stream.data() + offset, &header, kHeaderBytes);
  const size_t fields_bytes = header.table_bytes() + header.body_bytes;
  const size_t fields_begin = offset + kHeaderBytes;
  if (!header.has_fields() || stream.size() < fields_begin + fields_bytes + kFieldsCrcBytes) return;
  const uint32_t crc = crc32c(std::span(stream).subspan(fields_begin, fields_bytes));
  std::memcpy(stream.data() + fields_begin + fields_bytes, &crc, kFieldsCrcBytes);
}

TEST(DecoderFuzz, MutatedStreamsNeverBreakMoreThanTheirConnection) {
  const Bytes good = good_stream();
  const size_t second_frame = kHeaderBytes + 40 + kFieldsCrcBytes;
  std::mt19937 random(20240229);
  const auto below = [&](size_t limit) { return static_cast<size_t>(random()) % limit; };
  for (int round = 0; round < 3000; ++round) {
    Bytes stream = good;
    const size_t focus = below(2) == 0 ? second_frame + kHeaderBytes + 200 : stream.size();
    for (size_t change = below(4); change > 0; --change) {
      stream[below(focus)] = static_cast<std::byte>(random());
    }
    if (below(4) == 0) stream.resize(below(stream.size()));
    if (below(2) == 0) {
      repair_frame_at(stream, 0);
      repair_frame_at(stream, second_frame);
    }
    Bytes input{static_cast<std::byte>(random()), static_cast<std::byte>(random())};
    append(input, stream);
    fuzz_decoder(input);
  }
}

}  // namespace
}  // namespace psstore::testing
