// Exchange: over pairs of sockets whose other ends answer before they are asked, or on a thread of their own.
//
// Where an exchange has to succeed, quiet is no failure: the machine may be slow. It goes on where it stopped.
#include "client/exchange.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <random>
#include <thread>

#include "sleeps.h"
#include "wire_support.h"

namespace psstore::testing {
namespace {

// A connection of which the test is the other end.
class Ends {
 public:
  Ends() {
    int fds[2] = {-1, -1};
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    ours_ = fds[0];
    theirs_ = fds[1];
    const timeval moment{.tv_sec = 0, .tv_usec = 1000};
    EXPECT_EQ(setsockopt(ours_, SOL_SOCKET, SO_RCVTIMEO, &moment, sizeof moment), 0);
  }
  Ends(const Ends&) = delete;
  Ends& operator=(const Ends&) = delete;
  ~Ends() {
    close(ours_);
    hang_up();
  }

  Peer peer() { return {.fd = ours_, .decoder = &decoder}; }
  // As little is under way as the kernel lets us ask for: a few KiB.
  void narrow() {
    const int num_bytes = 1;
    EXPECT_EQ(setsockopt(ours_, SOL_SOCKET, SO_SNDBUF, &num_bytes, sizeof num_bytes), 0);
  }

  void reply(std::span<const std::byte> bytes) const {
    while (!bytes.empty()) {
      const ssize_t taken = send(theirs_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      ASSERT_GT(taken, 0);
      bytes = bytes.subspan(static_cast<size_t>(taken));
    }
  }
  // The next bytes that come; waits for them.
  Bytes read(size_t num_bytes) const {
    Bytes bytes(num_bytes);
    EXPECT_EQ(recv(theirs_, bytes.data(), num_bytes, MSG_WAITALL), static_cast<ssize_t>(num_bytes));
    return bytes;
  }
  // All that has come.
  Bytes came() const {
    Bytes all;
    Bytes some(64 << 10);
    for (;;) {
      const ssize_t received = recv(theirs_, some.data(), some.size(), MSG_DONTWAIT);
      if (received <= 0) return all;
      append(all, std::span(some).first(static_cast<size_t>(received)));
    }
  }
  void hang_up() {
    if (theirs_ >= 0) close(std::exchange(theirs_, -1));
  }

  FrameDecoder decoder;

 private:
  int ours_ = -1;
  int theirs_ = -1;
};

// A request to write or to read slices of some sizes, and its answer. No two of them touch in memory.
class Asking {
 public:
  Asking(Op op, uint64_t request, const std::vector<uint32_t>& sizes)
      : op_(op), request_(request), slices_(TestFrame::with_slices(sizes)) {
    size_t offset = 0;
    for (const uint32_t size : sizes) offset += size + 1;
    memory_.resize(offset);
    offset = 0;
    for (const uint32_t size : sizes) {
      ranges_.push_back(std::span(memory_).subspan(offset, size));
      offset += size + 1;
    }
    if (!reads()) scatter();
  }

  Call call(size_t peer = 0) const {
    Bytes head = wire();
    if (!reads()) head.resize(head.size() - slices_.payload.size());
    const Call::Ranges none;
    return {.peer = peer,
            .head = std::move(head),
            .payload = reads() ? none : ranges_,
            .destination = reads() ? ranges_ : none,
            .request = request_,
            .reply = reply_op()};
  }
  Bytes wire() const { return frame(op_, !reads()).wire(); }
  Bytes answer() const { return frame(reply_op(), reads()).wire(); }

  // A read's values are where they belong.
  bool arrived() const {
    Bytes all;
    for (const std::span<std::byte> range : ranges_) append(all, range);
    return all == slices_.payload;
  }
  bool untouched() const {
    return std::ranges::all_of(memory_, [](std::byte byte) { return byte == std::byte{0}; });
  }

 private:
  bool reads() const { return op_ == Op::kPULL; }
  Op reply_op() const { return static_cast<Op>(static_cast<uint8_t>(op_) + 1); }
  TestFrame frame(Op op, bool with_slices) const {
    TestFrame made = with_slices ? slices_ : TestFrame();
    made.op = op;
    made.forge = [this](Header& header) { header.request = request_; };
    return made;
  }
  void scatter() {
    std::span<const std::byte> from = slices_.payload;
    for (const std::span<std::byte> range : ranges_) {
      std::ranges::copy(from.first(range.size()), range.begin());
      from = from.subspan(range.size());
    }
  }

  Op op_;
  uint64_t request_;
  TestFrame slices_;
  Bytes memory_;
  std::vector<std::span<std::byte>> ranges_;
};

constexpr int kNoBell = -1;

Exchange exchange_of(Ends& ends, const std::vector<const Asking*>& asked) {
  std::vector<Call> calls;
  for (const Asking* one : asked) calls.push_back(one->call());
  return {{ends.peer()}, std::move(calls)};
}

bool finishes(Exchange& exchange) {
  for (int attempt = 0; attempt < 1000; ++attempt) {
    if (exchange.run(kNoBell)) return true;
  }
  return false;
}

Bytes unsent_of(const Exchange& exchange, size_t peer = 0) {
  Bytes all;
  for (const iovec& piece : exchange.unsent(peer)) {
    append(all, {static_cast<const std::byte*>(piece.iov_base), piece.iov_len});
  }
  return all;
}

Bytes joined(Bytes bytes, const Bytes& more) {
  append(bytes, more);
  return bytes;
}

// ---- answered ---------------------------------------------------------------------------------------

TEST(Exchange, SendsWhatIsAskedAndReceivesTheAnswers) {
  Ends ends;
  const Asking write(Op::kASSIGN, 1, {100, 0, 7});
  const Asking read(Op::kPULL, 2, {30, 0, 5000});
  ends.reply(joined(write.answer(), read.answer()));
  Exchange exchange = exchange_of(ends, {&write, &read});
  ASSERT_TRUE(finishes(exchange));
  EXPECT_EQ(ends.came(), joined(write.wire(), read.wire()));
  EXPECT_TRUE(read.arrived());
  EXPECT_TRUE(exchange.unsent(0).empty());
  for (const Call& call : exchange.calls()) {
    ASSERT_NE(call.answer, nullptr);
    EXPECT_EQ(call.answer->header.op, call.reply);
    EXPECT_FALSE(call.receiving);
  }
}

TEST(Exchange, LargePayloadsGoBothWaysWhileTheOtherEndReads) {
  Ends ends;
  const Asking write(Op::kASSIGN, 1, {1 << 19, 3, 100'000});
  const Asking read(Op::kPULL, 2, {3, 1 << 19, 100'000});
  const Bytes asked = joined(write.wire(), read.wire());
  std::thread other([&] {
    EXPECT_EQ(ends.read(asked.size()), asked);
    ends.reply(joined(write.answer(), read.answer()));
  });
  Exchange exchange = exchange_of(ends, {&write, &read});
  EXPECT_TRUE(finishes(exchange));
  EXPECT_TRUE(read.arrived());
  other.join();
}

TEST(Exchange, MorePiecesThanOneSystemCallTakesAreSentInOrder) {
  Ends ends;
  const Asking write(Op::kASSIGN, 1, std::vector<uint32_t>(kMaxSlices, 3));
  ends.reply(write.answer());
  Exchange exchange = exchange_of(ends, {&write});
  EXPECT_EQ(exchange.unsent(0).size(), 1 + kMaxSlices);
  Bytes came;
  for (int i = 0; i < 100 && !exchange.run(kNoBell); ++i) append(came, ends.came());
  append(came, ends.came());
  EXPECT_EQ(came, write.wire());
}

TEST(Exchange, RangesThatTouchAreOnePiece) {
  Ends ends;
  Bytes memory = random_bytes(10);
  const std::vector<std::span<std::byte>> ranges{std::span(memory).first(4),
                                                 std::span(memory).subspan(4)};
  Exchange exchange({ends.peer()}, {{.peer = 0,
                                     .head = Bytes(8),
                                     .payload = ranges,
                                     .destination = {},
                                     .request = 1,
                                     .reply = Op::kASSIGNED}});
  ASSERT_EQ(exchange.unsent(0).size(), 2u);
  EXPECT_EQ(unsent_of(exchange), joined(Bytes(8), memory));
}

TEST(Exchange, CallsToTwoPeersAreAnsweredInAnyOrder) {
  std::mt19937 random(1);
  for (int round = 0; round < 10; ++round) {
    Ends ends[2];
    std::vector<Asking> asked;
    for (uint64_t request = 1; request <= 6; ++request) {
      const auto size = static_cast<uint32_t>(request * 1000);
      asked.emplace_back(request % 3 == 0 ? Op::kASSIGN : Op::kPULL, request,
                         std::vector<uint32_t>{size, 1});
    }
    std::vector<Call> calls;
    for (size_t i = 0; i < asked.size(); ++i) calls.push_back(asked[i].call(i % 2));
    std::vector<size_t> order{0, 1, 2, 3, 4, 5};
    std::ranges::shuffle(order, random);
    for (const size_t i : order) ends[i % 2].reply(asked[i].answer());
    Exchange exchange({ends[0].peer(), ends[1].peer()}, std::move(calls));
    ASSERT_TRUE(finishes(exchange));
    for (const Asking& one : asked) EXPECT_TRUE(one.arrived());
    for (size_t i = 0; i < 6; ++i) {
      EXPECT_EQ(exchange.calls()[i].answer->header.request, i + 1);
    }
  }
}

// Requests of two connections may have the same number.
TEST(Exchange, AnAnswerIsOneToItsOwnPeersCall) {
  Ends ends[2];
  const Asking first(Op::kPULL, 1, {10});
  const Asking second(Op::kPULL, 1, {20});
  ends[0].reply(first.answer());
  ends[1].reply(second.answer());
  Exchange exchange({ends[0].peer(), ends[1].peer()}, {first.call(0), second.call(1)});
  ASSERT_TRUE(finishes(exchange));
  EXPECT_TRUE(first.arrived());
  EXPECT_TRUE(second.arrived());
}

TEST(Exchange, WhoIsBusyAsksAndDoesNotSleep) {
  Ends ends;
  const Asking read(Op::kPULL, 1, {30});
  Exchange exchange = exchange_of(ends, {&read});
  const long before = num_sleeps();
  EXPECT_FALSE(exchange.run(kNoBell, kQuiet));  // nobody answers
  EXPECT_EQ(num_sleeps(), before);
  EXPECT_FALSE(exchange.run(kNoBell));
  EXPECT_GT(num_sleeps(), before);
  ends.reply(read.answer());
  EXPECT_TRUE(exchange.run(kNoBell, kQuiet));
  EXPECT_TRUE(read.arrived());
}

// ---- not taken, not all there -----------------------------------------------------------------------

TEST(Exchange, WhatTheKernelDoesNotTakeIsTheUnsent) {
  Ends ends;
  ends.narrow();
  const Asking write(Op::kASSIGN, 1, {5000, 1, 30'000});
  Exchange exchange = exchange_of(ends, {&write});
  Bytes came;
  while (!exchange.unsent(0).empty()) {
    EXPECT_FALSE(exchange.run(kNoBell));
    const size_t before = came.size();
    append(came, ends.came());
    ASSERT_GT(came.size(), before);
    EXPECT_EQ(joined(came, unsent_of(exchange)), write.wire());
  }
  ends.reply(write.answer());
  EXPECT_TRUE(finishes(exchange));
}

TEST(Exchange, SendingAloneTakesNoAnswer) {
  Ends ends;
  ends.narrow();
  const Asking write(Op::kASSIGN, 1, {30'000});
  ends.reply(write.answer());
  Exchange exchange = exchange_of(ends, {&write});
  EXPECT_FALSE(exchange.send());
  Bytes came = ends.came();
  EXPECT_EQ(joined(came, unsent_of(exchange)), write.wire());
  while (!exchange.send()) append(came, ends.came());
  append(came, ends.came());
  EXPECT_EQ(came, write.wire());
  EXPECT_EQ(exchange.calls()[0].answer, nullptr);
  EXPECT_TRUE(finishes(exchange));
}

TEST(Exchange, AnAnswerBeforeAllIsSentIsNotTheEnd) {
  Ends ends;
  ends.narrow();
  const Asking write(Op::kASSIGN, 1, {30'000});
  ends.reply(write.answer());
  Exchange exchange = exchange_of(ends, {&write});
  EXPECT_FALSE(exchange.run(kNoBell));
  EXPECT_NE(exchange.calls()[0].answer, nullptr);
  Bytes came = ends.came();
  EXPECT_EQ(joined(came, unsent_of(exchange)), write.wire());
  for (int i = 0; i < 100 && !exchange.run(kNoBell); ++i) append(came, ends.came());
  append(came, ends.came());
  EXPECT_EQ(came, write.wire());
}

TEST(Exchange, AnAnswerThatIsCutGoesOnWhereItStopped) {
  const Asking shape(Op::kPULL, 1, {100'000, 300});
  const size_t size = shape.answer().size();
  const size_t payload_begin = size - 100'300;
  for (const size_t cut : {size_t{1}, kHeaderBytes + 10, payload_begin + 1000, size - 10}) {
    Ends ends;
    const Asking read(Op::kPULL, 1, {100'000, 300});
    const Bytes answer = read.answer();
    ends.reply(std::span(answer).first(cut));
    Exchange exchange = exchange_of(ends, {&read});
    EXPECT_FALSE(exchange.run(kNoBell));
    EXPECT_EQ(exchange.calls()[0].receiving, cut > payload_begin);
    EXPECT_EQ(exchange.calls()[0].answer, nullptr);
    EXPECT_TRUE(ends.decoder.mid_frame());
    ends.reply(std::span(answer).subspan(cut));
    ASSERT_TRUE(finishes(exchange)) << "cut at " << cut;
    EXPECT_FALSE(exchange.calls()[0].receiving);
    EXPECT_TRUE(read.arrived());
  }
}

TEST(Exchange, ABellEndsTheWaitForAnAnswer) {
  Ends ends;
  const Asking write(Op::kASSIGN, 1, {100});
  const int bell = eventfd(1, EFD_CLOEXEC);
  Exchange exchange = exchange_of(ends, {&write});
  EXPECT_FALSE(exchange.run(bell));
  close(bell);
  EXPECT_EQ(ends.came(), write.wire());
  EXPECT_EQ(exchange.calls()[0].answer, nullptr);
  EXPECT_FALSE(ends.decoder.mid_frame());
  ends.reply(write.answer());
  EXPECT_TRUE(finishes(exchange));
}

TEST(Exchange, ASocketWhoseRecvDoesNotSleepIsPolled) {
  Ends ends;
  EXPECT_EQ(fcntl(ends.peer().fd, F_SETFL, O_NONBLOCK), 0);
  const Asking write(Op::kASSIGN, 1, {100});
  std::thread other([&] {
    ends.read(write.wire().size());
    ends.reply(write.answer());
  });
  Exchange exchange = exchange_of(ends, {&write});
  EXPECT_TRUE(finishes(exchange));
  other.join();
}

// ---- something else comes ---------------------------------------------------------------------------

struct OtherFrame {
  const char* name;
  TestFrame frame;
  uint64_t request = 1;
};

std::ostream& operator<<(std::ostream& out, const OtherFrame& other) {
  return out << other.name;
}

class OtherFrames : public ::testing::TestWithParam<OtherFrame> {};

// To a write with number 1 and a read with number 2.
TEST_P(OtherFrames, AreLeftToWhoeverGoesOn) {
  Ends ends;
  const Asking write(Op::kASSIGN, 1, {100});
  const Asking read(Op::kPULL, 2, {300});
  TestFrame other = GetParam().frame;
  other.forge = [](Header& header) { header.request = GetParam().request; };
  ends.reply(joined(joined(read.answer(), other.wire()), write.answer()));
  Exchange exchange = exchange_of(ends, {&write, &read});
  EXPECT_FALSE(exchange.run(kNoBell));
  const std::shared_ptr<Frame> frame = exchange.peers()[0].other;
  ASSERT_NE(frame, nullptr);
  EXPECT_EQ(frame->header.op, other.op);
  EXPECT_EQ(frame->complete, other.payload.empty());
  EXPECT_NE(exchange.calls()[1].answer, nullptr);
  EXPECT_EQ(exchange.calls()[0].answer, nullptr);
  EXPECT_FALSE(exchange.calls()[0].receiving);
  if (!frame->complete) {
    ends.decoder.discard();
    EXPECT_EQ(ends.decoder.next_frame(), frame);
  }
  EXPECT_EQ(ends.decoder.next_frame()->header.op, Op::kASSIGNED);
}

TestFrame frame_with(Op op, const std::vector<uint32_t>& sizes = {}) {
  TestFrame frame = TestFrame::with_slices(sizes);
  frame.op = op;
  return frame;
}

INSTANTIATE_TEST_SUITE_P(
    Exchange, OtherFrames,
    ::testing::Values(OtherFrame{"AnError", frame_with(Op::kERROR)},
                      OtherFrame{"AnAnswerNobodyWaitsFor", frame_with(Op::kASSIGNED), 9},
                      OtherFrame{"APayloadNobodyWaitsFor", frame_with(Op::kPULLED, {300}), 9},
                      OtherFrame{"AnotherOperationsAnswer", frame_with(Op::kPULLED, {100})},
                      OtherFrame{"APayloadWithoutAPlace", frame_with(Op::kASSIGNED, {100})},
                      OtherFrame{"ASecondAnswer", frame_with(Op::kPULLED, {300}), 2}),
    [](const auto& frame) { return frame.param.name; });

TEST(Exchange, AnAnswerInSharedMemoryIsLeft) {
  Ends ends;
  const Asking read(Op::kPULL, 1, {300});
  TestFrame shared = frame_with(Op::kPULLED, {300});
  shared.payload.clear();
  shared.checksum = false;
  shared.forge = [](Header& header) {
    header.request = 1;
    header.flags |= kFlagShared;
    header.payload_bytes = 300;
  };
  ends.reply(shared.wire());
  Exchange exchange = exchange_of(ends, {&read});
  EXPECT_FALSE(exchange.run(kNoBell));
  ASSERT_NE(exchange.peers()[0].other, nullptr);
  EXPECT_TRUE(exchange.peers()[0].other->header.is_shared());
  EXPECT_TRUE(read.untouched());
}

// ---- a connection ends ------------------------------------------------------------------------------

// The error that the decoder will say again.
ErrorCode broken(FrameDecoder& decoder) {
  try {
    decoder.next_frame();
  } catch (const Error& error) {
    return error.code();
  }
  return ErrorCode::OK;
}

TEST(Exchange, BytesThatAreNoFrameEndItAndTheDecoderSaysWhy) {
  Ends ends;
  const Asking read(Op::kPULL, 1, {300});
  ends.reply(random_bytes(200));
  Exchange exchange = exchange_of(ends, {&read});
  EXPECT_FALSE(exchange.run(kNoBell));
  EXPECT_EQ(broken(ends.decoder), ErrorCode::BAD_MAGIC);
  EXPECT_FALSE(exchange.run(kNoBell));
}

TEST(Exchange, AnAnswerOfOtherSizesGoesNowhere) {
  for (const std::vector<uint32_t>& sizes : {std::vector<uint32_t>{301}, {150, 150}, {}}) {
    Ends ends;
    const Asking read(Op::kPULL, 1, {300});
    TestFrame answer = frame_with(Op::kPULLED, sizes);
    if (sizes.empty()) answer.payload = random_bytes(300);
    answer.forge = [](Header& header) { header.request = 1; };
    ends.reply(answer.wire());
    Exchange exchange = exchange_of(ends, {&read});
    EXPECT_FALSE(exchange.run(kNoBell));
    EXPECT_EQ(broken(ends.decoder), ErrorCode::BAD_HEADER);
    EXPECT_TRUE(read.untouched());
  }
}

TEST(Exchange, AChecksumThatIsWrongIsNoAnswer) {
  Ends ends;
  const Asking read(Op::kPULL, 1, {300});
  Bytes answer = read.answer();
  answer.back() ^= std::byte{1};
  ends.reply(answer);
  Exchange exchange = exchange_of(ends, {&read});
  EXPECT_FALSE(exchange.run(kNoBell));
  EXPECT_EQ(broken(ends.decoder), ErrorCode::BAD_CHECKSUM);
  EXPECT_EQ(exchange.calls()[0].answer, nullptr);
}

TEST(Exchange, NothingIsSentToAnEndThatIsGone) {
  Ends ends;
  ends.hang_up();
  const Asking write(Op::kASSIGN, 1, {100});
  Exchange exchange = exchange_of(ends, {&write});
  EXPECT_FALSE(exchange.run(kNoBell));
  EXPECT_EQ(unsent_of(exchange), write.wire());
}

TEST(Exchange, AnEndThatGoesInTheMiddleOfAnAnswerEndsIt) {
  Ends ends;
  const Asking read(Op::kPULL, 1, {300});
  Exchange exchange = exchange_of(ends, {&read});
  EXPECT_FALSE(exchange.run(kNoBell));
  EXPECT_EQ(ends.came(), read.wire());
  const Bytes answer = read.answer();
  ends.reply(std::span(answer).first(answer.size() - 1));
  ends.hang_up();
  EXPECT_FALSE(exchange.run(kNoBell));
  EXPECT_TRUE(exchange.calls()[0].receiving);
  EXPECT_EQ(exchange.calls()[0].answer, nullptr);
}

TEST(Exchange, AnAnswerIsTakenFromAnEndThatIsGone) {
  Ends ends;
  const Asking read(Op::kPULL, 1, {300});
  Exchange exchange = exchange_of(ends, {&read});
  EXPECT_FALSE(exchange.run(kNoBell));
  EXPECT_EQ(ends.came(), read.wire());
  ends.reply(read.answer());
  ends.hang_up();
  EXPECT_TRUE(finishes(exchange));
  EXPECT_TRUE(read.arrived());
}

}  // namespace
}  // namespace psstore::testing
