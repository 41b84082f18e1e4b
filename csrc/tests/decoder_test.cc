// FrameDecoder: every case whole, byte by byte and with the next frame behind it; then what it refuses.
#include "wire/decoder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "wire_support.h"

namespace psstore::testing {
namespace {

std::span<const std::byte> payload_of(const Frame& frame) {
  return {frame.payload->data(), frame.payload->size()};
}

bool equal(std::span<const std::byte> a, std::span<const std::byte> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

// ---- good frames, in reads of every size ------------------------------------------------------------

struct Case {
  const char* name;
  std::function<TestFrame()> make;
};

class Frames : public ::testing::TestWithParam<std::tuple<Case, size_t>> {
 protected:
  TestFrame frame_ = std::get<0>(GetParam()).make();
  size_t max_read_ = std::get<1>(GetParam());

  void expect_head(const Frame& frame) const {
    EXPECT_EQ(frame.header.op, frame_.op);
    EXPECT_EQ(frame.body,
              std::string(reinterpret_cast<const char*>(frame_.body.data()), frame_.body.size()));
    ASSERT_EQ(frame.table.size(), frame_.sizes.size());
    for (size_t i = 0; i < frame_.sizes.size(); ++i) {
      EXPECT_EQ(frame.table[i].num_bytes, frame_.sizes[i]);
    }
  }
};

// Three in a row: each one's first bytes are the leftovers of the one before it.
TEST_P(Frames, ArriveInABuffer) {
  const auto pool = BufferPool::create(0);
  Bytes stream;
  for (int i = 0; i < 3; ++i) append(stream, frame_.wire());
  FrameDecoder decoder;
  int num_complete = 0;
  deliver(decoder, stream, max_read_, [&](Frame& frame) {
    expect_head(frame);
    if (!frame.complete) {
      decoder.accept(pool->allocate(frame.header.payload_bytes));
      return;
    }
    ++num_complete;
    if (!frame_.payload.empty()) {
      EXPECT_TRUE(equal(payload_of(frame), frame_.payload));
    }
  });
  EXPECT_EQ(num_complete, 3);
  EXPECT_FALSE(decoder.mid_frame());
}

TEST_P(Frames, AreScatteredIntoRanges) {
  const Bytes wire = frame_.wire();
  std::vector<Bytes> memory;
  std::vector<std::span<std::byte>> ranges;
  for (const uint32_t size : frame_.sizes) memory.emplace_back(size);
  for (Bytes& range : memory) ranges.emplace_back(range);
  FrameDecoder decoder;
  deliver(decoder, wire, max_read_, [&](Frame& frame) {
    if (!frame.complete) decoder.accept(ranges);
  });
  Bytes gathered;
  for (const Bytes& range : memory) append(gathered, range);
  if (!frame_.sizes.empty()) {
    EXPECT_EQ(gathered, frame_.payload);
  }
  EXPECT_FALSE(decoder.mid_frame());
}

TEST_P(Frames, PassByWhenDiscarded) {
  Bytes stream = frame_.wire();
  append(stream, TestFrame{.op = Op::kSTATS, .body = random_bytes(5)}.wire());
  FrameDecoder decoder;
  std::vector<Op> complete;
  deliver(decoder, stream, max_read_, [&](Frame& frame) {
    if (!frame.complete) {
      decoder.discard();
    } else {
      complete.push_back(frame.header.op);
      EXPECT_FALSE(frame.payload);
    }
  });
  EXPECT_EQ(complete, (std::vector{frame_.op, Op::kSTATS}));
}

TEST_P(Frames, CanBeFedWithoutWindows) {
  const auto pool = BufferPool::create(0);
  const Bytes stream = frame_.wire();
  FrameDecoder decoder;
  bool complete = false;
  for (std::span<const std::byte> rest = stream; !rest.empty();) {
    const size_t size = std::min(max_read_, rest.size());
    decoder.feed(rest.first(size));
    rest = rest.subspan(size);
    while (const std::shared_ptr<Frame> frame = decoder.next_frame()) {
      complete = frame->complete;
      if (!complete) decoder.accept(pool->allocate(frame->header.payload_bytes));
    }
  }
  EXPECT_TRUE(complete);
  EXPECT_FALSE(decoder.mid_frame());
}

// Bodies beyond what is read at once, slices that are received in place and others: each a little over its bound, since
// byte by byte takes long.
const Case kCases[] = {
    {"Empty", [] { return TestFrame{.op = Op::kLEAVE}; }},
    {"Body", [] { return TestFrame{.op = Op::kJOIN, .body = random_bytes(77)}; }},
    {"LongBody",
     [] { return TestFrame{.op = Op::kCREATE, .body = random_bytes(kHeadBufferBytes + 1)}; }},
    {"TableWithoutPayload",
     [] { return TestFrame{.op = Op::kPULL, .sizes = {0, 0, 0}, .body = random_bytes(9)}; }},
    {"LongTable", [] { return TestFrame{.op = Op::kPULL, .sizes = std::vector<uint32_t>(4096)}; }},
    {"SmallPayload", [] { return TestFrame::with_slices({4, 0, 100, 1}); }},
    {"PayloadWithoutTable", [] { return TestFrame{.payload = random_bytes(1000)}; }},
    {"LargeSlices", [] { return TestFrame::with_slices({70'000, 0, 130'001, 65'536}); }},
    {"MixedSlices", [] { return TestFrame::with_slices({12, 70'000, 7, 65'535, 65'537, 1}); }},
    {"WithoutChecksum",
     [] {
       TestFrame frame = TestFrame::with_slices({70'000});
       frame.checksum = false;
       return frame;
     }},
};

INSTANTIATE_TEST_SUITE_P(Reads, Frames,
                         ::testing::Combine(::testing::ValuesIn(kCases),
                                            ::testing::Values(1, 63, 4096, 1u << 30)),
                         [](const auto& tested) {
                           return std::string(std::get<0>(tested.param).name) + "By" +
                                  std::to_string(std::get<1>(tested.param));
                         });

// ---- where the kernel writes ------------------------------------------------------------------------

class Windows : public ::testing::Test {
 protected:
  // A decoder that has announced the frame's payload.
  void announce(const TestFrame& frame) {
    const Bytes wire = frame.wire();
    decoder_.feed(std::span(wire).first(wire.size() - frame.payload.size()));
    ASSERT_FALSE(decoder_.next_frame()->complete);
  }
  FrameDecoder decoder_;
};

TEST_F(Windows, LargeRangesAreReceivedInPlace) {
  announce(TestFrame::with_slices({100, 200'000}));
  Bytes small(100);
  Bytes large(200'000);
  const std::vector<std::span<std::byte>> ranges{small, large};
  decoder_.accept(ranges);
  EXPECT_FALSE(decoder_.writable().in_destination);  // the small one comes through the head buffer
  decoder_.written(0);
  decoder_.feed(Bytes(100));
  EXPECT_EQ(decoder_.next_frame(), nullptr);
  const FrameDecoder::Window window = decoder_.writable();
  EXPECT_TRUE(window.in_destination);
  EXPECT_EQ(window.bytes.data(), large.data());
  EXPECT_EQ(window.bytes.size(), large.size());
  decoder_.written(150'000);
  EXPECT_FALSE(decoder_.writable().in_destination);  // less than 64 KiB are missing
}

TEST_F(Windows, SlicesSideBySideAreReceivedInOneGo) {
  const TestFrame frame = TestFrame::with_slices({40'000, 0, 40'000, 40'000});
  announce(frame);
  Bytes memory(120'000);
  Bytes unused(7);
  const std::span<std::byte> all(memory);
  const std::vector<std::span<std::byte>> ranges{all.first(40'000), unused,
                                                 all.subspan(40'000, 40'000), all.last(40'000)};
  decoder_.accept(ranges);
  const FrameDecoder::Window window = decoder_.writable();
  EXPECT_EQ(window.bytes.data(), memory.data());
  EXPECT_EQ(window.bytes.size(), memory.size());
  decoder_.feed(frame.payload);
  EXPECT_TRUE(decoder_.next_frame()->complete);
  EXPECT_EQ(memory, frame.payload);
}

TEST_F(Windows, AreNeverEmptyAndAFullHeadSaysSo) {
  announce(TestFrame::with_slices({100'000}));
  for (size_t room = kHeadBufferBytes; room > 0; room -= 1024) {
    EXPECT_EQ(decoder_.writable().bytes.size(), std::min(room, kFrameReadBytes));
    decoder_.written(1024);
  }
  EXPECT_THROW(decoder_.writable(), std::invalid_argument);
  decoder_.discard();
  EXPECT_FALSE(decoder_.writable().bytes.empty());
}

TEST_F(Windows, AreLargerForAPayloadOfManySmallRanges) {
  announce(TestFrame::with_slices({kDirectReceiveBytes - 1, kDirectReceiveBytes - 1}));
  Bytes one(kDirectReceiveBytes - 1);
  Bytes other(kDirectReceiveBytes - 1);
  const std::vector<std::span<std::byte>> ranges{one, other};
  EXPECT_EQ(decoder_.writable().bytes.size(), kFrameReadBytes);
  decoder_.accept(ranges);
  EXPECT_EQ(decoder_.writable().bytes.size(), kHeadBufferBytes);
}

TEST_F(Windows, OnlyTheLastOneCounts) {
  EXPECT_THROW(decoder_.written(1), std::invalid_argument);
  const size_t room = decoder_.writable().bytes.size();
  EXPECT_THROW(decoder_.written(room + 1), std::invalid_argument);
  EXPECT_EQ(decoder_.writable().bytes.size(), room);
  decoder_.next_frame();
  EXPECT_THROW(decoder_.written(1), std::invalid_argument);
}

// ---- calls out of order -----------------------------------------------------------------------------

TEST_F(Windows, AnAnnouncedPayloadMustBeAnsweredFirst) {
  announce(TestFrame::with_slices({10}));
  EXPECT_THROW(decoder_.next_frame(), std::invalid_argument);
  decoder_.discard();
  EXPECT_EQ(decoder_.next_frame(), nullptr);
}

TEST_F(Windows, NothingCanBeAcceptedBeforeItIsAnnounced) {
  EXPECT_THROW(decoder_.discard(), std::invalid_argument);
  EXPECT_THROW(decoder_.accept(BufferPool::create(0)->allocate(1)), std::invalid_argument);
}

TEST_F(Windows, ABufferOfAnotherSizeIsRefusedAndNothingIsLost) {
  const TestFrame frame = TestFrame::with_slices({10});
  announce(frame);
  const auto pool = BufferPool::create(0);
  EXPECT_THROW(decoder_.accept(pool->allocate(9)), std::invalid_argument);
  decoder_.accept(pool->allocate(10));
  decoder_.feed(frame.payload);
  EXPECT_TRUE(decoder_.next_frame()->complete);
}

TEST_F(Windows, FedBytesAreKeptOnceAndNotTwice) {
  const TestFrame frame = TestFrame::with_slices({300'000});
  announce(frame);
  decoder_.feed(frame.payload);
  EXPECT_THROW(decoder_.feed(frame.payload), std::invalid_argument);
  decoder_.accept(BufferPool::create(0)->allocate(300'000));
  EXPECT_TRUE(decoder_.next_frame()->complete);
  EXPECT_FALSE(decoder_.mid_frame());
}

TEST(FrameDecoder, KnowsWhetherItIsInTheMiddle) {
  FrameDecoder decoder;
  const Bytes wire = TestFrame{.op = Op::kJOIN, .body = random_bytes(3)}.wire();
  EXPECT_FALSE(decoder.mid_frame());
  for (size_t i = 0; i < wire.size(); ++i) {
    decoder.feed(std::span(wire).subspan(i, 1));
    EXPECT_TRUE(decoder.mid_frame());
    EXPECT_EQ(decoder.next_frame() != nullptr, i + 1 == wire.size());
  }
  EXPECT_FALSE(decoder.mid_frame());
}

// ---- bad frames -------------------------------------------------------------------------------------

ErrorCode decode_all(FrameDecoder& decoder, std::span<const std::byte> stream) {
  try {
    deliver(decoder, stream, 1u << 30, [&](Frame& frame) {
      if (!frame.complete) decoder.discard();
    });
  } catch (const Error& error) {
    return error.code();
  }
  return ErrorCode::OK;
}

ErrorCode decode_all(std::span<const std::byte> stream, FrameLimits limits = {}) {
  FrameDecoder decoder(limits);
  return decode_all(decoder, stream);
}

TEST(FrameDecoder, RefusesLengthsBeforeTheirBytesCome) {
  const auto header_only = [](std::function<void(Header&)> forge) {
    return decode_all(TestFrame{.op = Op::kPUSH, .forge = std::move(forge)}.wire());
  };
  EXPECT_EQ(header_only([](Header& h) { h.num_slices = kMaxSlices + 1; }),
            ErrorCode::FRAME_TOO_LARGE);
  EXPECT_EQ(header_only([](Header& h) { h.num_slices = UINT32_MAX; }), ErrorCode::FRAME_TOO_LARGE);
  EXPECT_EQ(header_only([](Header& h) { h.body_bytes = kMaxBodyBytes + 1; }),
            ErrorCode::FRAME_TOO_LARGE);
  EXPECT_EQ(header_only([](Header& h) { h.payload_bytes = UINT64_MAX; }),
            ErrorCode::FRAME_TOO_LARGE);
}

TEST(FrameDecoder, IsTighterBeforeTheHandshakeIsOver) {
  const FrameLimits limits{.max_body_bytes = kPreAuthMaxBytes, .max_payload_bytes = 0};
  const auto code = [&](const TestFrame& frame) { return decode_all(frame.wire(), limits); };
  EXPECT_EQ(code({.op = Op::kHELLO, .body = Bytes(kPreAuthMaxBytes)}), ErrorCode::OK);
  EXPECT_EQ(code({.op = Op::kHELLO, .body = Bytes(kPreAuthMaxBytes + 1)}),
            ErrorCode::FRAME_TOO_LARGE);
  EXPECT_EQ(code({.op = Op::kPUSH, .payload = Bytes(1)}), ErrorCode::FRAME_TOO_LARGE);
  EXPECT_EQ(code({.op = Op::kPULL, .sizes = std::vector<uint32_t>(129)}),
            ErrorCode::FRAME_TOO_LARGE);
}

TEST(FrameDecoder, AppliesNewLimitsFromTheNextHeaderOn) {
  FrameDecoder decoder({.max_body_bytes = 10, .max_payload_bytes = 0});
  const Bytes large = TestFrame{.op = Op::kCREATE, .body = Bytes(11)}.wire();
  EXPECT_EQ(decode_all(decoder, TestFrame{.op = Op::kHELLO, .body = Bytes(10)}.wire()),
            ErrorCode::OK);
  decoder.set_limits({});
  EXPECT_EQ(decode_all(decoder, large), ErrorCode::OK);
}

TEST(FrameDecoder, RefusesSizesThatDoNotAddUp) {
  TestFrame frame = TestFrame::with_slices({10, 20});
  frame.forge = [](Header& h) { h.payload_bytes = 29; };
  EXPECT_EQ(decode_all(frame.wire()), ErrorCode::BAD_HEADER);
}

TEST(FrameDecoder, RefusesReservedFieldsThatAreNotZero) {
  for (const uint64_t offset : {uint64_t{1}, uint64_t{1} << 56}) {
    TestFrame frame{.op = Op::kPULL, .sizes = {0}};
    frame.forge_entry = [&](SliceEntry& entry) { entry.offset = offset; };
    EXPECT_EQ(decode_all(frame.wire()), ErrorCode::BAD_HEADER);
  }
}

TEST(FrameDecoder, RefusesPartsThatAnOperationIsNotAbout) {
  const auto code = [](Op op, uint16_t part) {
    TestFrame frame{.op = op, .sizes = {0}};
    frame.forge_entry = [&](SliceEntry& entry) { entry.part = part; };
    return decode_all(frame.wire());
  };
  for (const Op op : {Op::kPULL, Op::kPULLED, Op::kRESTORE, Op::kRESTORED}) {
    for (uint16_t part = 0; part <= kMaxPart; ++part) EXPECT_EQ(code(op, part), ErrorCode::OK);
    EXPECT_EQ(code(op, kMaxPart + 1), ErrorCode::BAD_HEADER);
    EXPECT_EQ(code(op, UINT16_MAX), ErrorCode::BAD_HEADER);
  }
  for (const Op op : {Op::kPUSH, Op::kPUSHED, Op::kASSIGN, Op::kINIT, Op::kNORM, Op::kNORMED}) {
    EXPECT_EQ(code(op, 0), ErrorCode::OK);
    EXPECT_EQ(code(op, 1), ErrorCode::BAD_HEADER);
  }
}

// Nobody sees a frame before it is known to be what was sent, as far as it has come.
TEST(FrameDecoder, NoticesEveryChangedBitOfTableAndBody) {
  TestFrame frame = TestFrame::with_slices({4, 0, 300});
  frame.body = random_bytes(40);
  const Bytes good = frame.wire();
  const size_t payload_begin = good.size() - frame.payload.size();
  for (size_t bit = 8 * kHeaderBytes; bit < 8 * payload_begin; ++bit) {
    Bytes wire = good;
    wire[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_EQ(decode_all(std::span(wire).first(payload_begin)), ErrorCode::BAD_CHECKSUM)
        << "bit " << bit;
  }
}

TEST(FrameDecoder, NoticesAChangedPayload) {
  for (const uint32_t size : {100u, 200'000u}) {
    Bytes wire = TestFrame::with_slices({size}).wire();
    wire.back() ^= std::byte{1};
    EXPECT_EQ(decode_all(wire), ErrorCode::BAD_CHECKSUM);
  }
}

TEST(FrameDecoder, RefusesRangesThatWereNotAskedFor) {
  const Bytes wire = TestFrame::with_slices({10, 20}).wire();
  Bytes ten(10);
  Bytes nineteen(19);
  const std::vector<std::vector<std::span<std::byte>>> wrong{{ten}, {ten, nineteen}, {}};
  for (const auto& ranges : wrong) {
    FrameDecoder decoder;
    decoder.feed(wire);
    ASSERT_FALSE(decoder.next_frame()->complete);
    EXPECT_THROW(decoder.accept(ranges), Error);
    EXPECT_THROW(decoder.next_frame(), Error);
  }
}

TEST(FrameDecoder, StaysBrokenAndForgetsTheDestination) {
  FrameDecoder decoder;
  const TestFrame frame = TestFrame::with_slices({100'000});
  Bytes wire = frame.wire();
  wire.back() ^= std::byte{1};
  decoder.feed(wire);
  decoder.next_frame();
  const BufferRef buffer = BufferPool::create(0)->allocate(100'000);
  decoder.accept(buffer);
  std::string first;
  try {
    decoder.next_frame();
  } catch (const Error& error) {
    first = error.what();
  }
  EXPECT_TRUE(buffer.unique());
  const std::vector<std::function<void()>> calls{
      [&] { decoder.next_frame(); }, [&] { decoder.writable(); }, [&] { decoder.written(0); },
      [&] { decoder.feed(wire); },   [&] { decoder.discard(); },  [&] { decoder.accept(buffer); }};
  for (const auto& call : calls) {
    try {
      call();
      ADD_FAILURE() << "a broken decoder went on";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::BAD_CHECKSUM);
      EXPECT_EQ(error.what(), first);
    }
  }
}

TEST(FrameDecoder, GivesTheGoodFramesBeforeABadOne) {
  Bytes stream = TestFrame{.op = Op::kSTATS}.wire();
  append(stream, random_bytes(kHeaderBytes));
  FrameDecoder decoder;
  decoder.feed(stream);
  EXPECT_EQ(decoder.next_frame()->header.op, Op::kSTATS);
  EXPECT_THROW(decoder.next_frame(), Error);
}

// Who has said a frame of ours speaks the protocol.
TEST(FrameDecoder, TakesAnotherPreambleBehindAGoodFrameForDamage) {
  const Bytes good = TestFrame{.op = Op::kSTATS}.wire();
  Bytes bad = good;
  bad[0] ^= std::byte{1};
  EXPECT_EQ(decode_all(bad), ErrorCode::BAD_MAGIC);
  Bytes stream = good;
  append(stream, bad);
  EXPECT_EQ(decode_all(stream), ErrorCode::BAD_CHECKSUM);
}

}  // namespace
}  // namespace psstore::testing
