// ClientSession, over pairs of sockets whose other ends answer before they are asked, or on a thread of their own.
//
// Where a drive has to succeed, quiet is no failure: the machine may be slow. It goes on where it stopped.
#include "client/session.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <random>
#include <thread>

#include "client/drive.h"
#include "core/breakable_rules.h"
#include "shm/push_arena.h"
#include "shm/value_arena.h"
#include "sleeps.h"
#include "wire/carry.h"
#include "wire_support.h"

namespace psstore::testing {
namespace {

constexpr int kNoWakeup = -1;
constexpr double kTimeoutS = 10.0;

// What the sessions of a test carry.
class TestDecisions final : public CarriedDecisions {
 public:
  News since(uint64_t told) override {
    asked.push_back(told);
    const bool any = told < last;
    return {.newest = any ? last : 0,
            .decisions = any ? "signed" : "",
            .scaled = is_scaled ? last : 0,
            .factor = is_scaled ? std::optional(0.5) : std::nullopt};
  }

  std::vector<uint64_t> asked;
};

// The other end of a session, which is up.
class Ends {
 public:
  explicit Ends(uint64_t last_sequence = 0)
      : decisions(std::make_shared<TestDecisions>()), session(decisions) {
    open(last_sequence);
  }
  Ends(const Ends&) = delete;
  Ends& operator=(const Ends&) = delete;
  ~Ends() { shut(); }

  void open(uint64_t last_sequence = 0) {
    int fds[2] = {-1, -1};
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    ours = fds[0];
    theirs_ = fds[1];
    const timeval moment{.tv_sec = 0, .tv_usec = 1000};
    EXPECT_EQ(setsockopt(ours, SOL_SOCKET, SO_RCVTIMEO, &moment, sizeof moment), 0);
    session.connected();
    session.open(ours);
    session.welcomed(0, last_sequence, 0.0);
  }
  void shut() {
    session.disconnected();
    session.tidy();
    close(ours);
    hang_up();
  }
  void hang_up() {
    if (theirs_ >= 0) close(std::exchange(theirs_, -1));
  }

  bool drive(int wakeup_fd = kNoWakeup, std::chrono::nanoseconds busy = {}) {
    ClientSession* const one = &session;
    const bool all = psstore::drive({&one, 1}, wakeup_fd, busy);
    session.tell_answered();
    return all;
  }
  bool finishes() {
    for (int attempt = 0; attempt < 1000; ++attempt) {
      if (drive()) return true;
    }
    return false;
  }
  // As little is under way as the kernel lets us ask for: a few KiB.
  void narrow() const {
    const int num_bytes = 1;
    EXPECT_EQ(setsockopt(ours, SOL_SOCKET, SO_SNDBUF, &num_bytes, sizeof num_bytes), 0);
  }
  void reply(std::span<const std::byte> bytes) const {
    while (!bytes.empty()) {
      const ssize_t taken = send(theirs_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      ASSERT_GT(taken, 0);
      bytes = bytes.subspan(static_cast<size_t>(taken));
    }
  }
  // All that has come to the other end.
  Bytes came() const {
    Bytes all;
    Bytes some(64 << 10);
    for (;;) {
      const ssize_t received = recv(theirs_, some.data(), some.size(), MSG_DONTWAIT);
      if (received <= 0) return all;
      append(all, std::span(some).first(static_cast<size_t>(received)));
    }
  }
  // All that is still to be sent, and what of it has come before.
  Bytes sent() {
    Bytes all;
    for (int i = 0; i < 1000 && !session.outgoing().done(); ++i) {
      drive();
      append(all, came());
    }
    append(all, came());
    return all;
  }
  // The next bytes that come; waits for them.
  Bytes read(size_t num_bytes) const {
    Bytes bytes(num_bytes);
    EXPECT_EQ(recv(theirs_, bytes.data(), num_bytes, MSG_WAITALL), static_cast<ssize_t>(num_bytes));
    return bytes;
  }
  Bytes unsent() const {
    Bytes all;
    for (const iovec& piece : session.outgoing().pieces()) {
      append(all, {static_cast<const std::byte*>(piece.iov_base), piece.iov_len});
    }
    return all;
  }

  std::shared_ptr<TestDecisions> decisions;
  ClientSession session;
  int ours = -1;

 private:
  int theirs_ = -1;
};

// A frame that was sent, with its payload.
struct Sent {
  Header header;
  std::vector<SliceEntry> table;
  std::string body;
  Bytes payload;
};

std::vector<Sent> frames_of(const Bytes& bytes) {
  std::vector<Sent> frames;
  FrameDecoder decoder;
  deliver(decoder, bytes, bytes.size() + 1, [&](Frame& frame) {
    if (frame.complete) {
      Sent sent{frame.header, {frame.table.begin(), frame.table.end()}, frame.body, {}};
      if (frame.payload) append(sent.payload, {frame.payload->data(), frame.payload->size()});
      frames.push_back(std::move(sent));
    } else {
      decoder.accept(BufferPool::create(0)->allocate(frame.header.payload_bytes));
    }
  });
  return frames;
}

// Requests to write or to read slices of some sizes, and their answers. No two slices touch in memory.
class Asking {
 public:
  Asking(Op op, const std::vector<uint32_t>& sizes)
      : op_(op), slices_(TestFrame::with_slices(sizes)) {
    size_t offset = 0;
    for (const uint32_t size : sizes) {
      entries_.push_back({.key = entries_.size(), .num_bytes = reads() ? 0 : size});
      offset += size + 1;
    }
    memory_.resize(offset);
    offset = 0;
    for (const uint32_t size : sizes) {
      ranges_.push_back(std::span(memory_).subspan(offset, size));
      offset += size + 1;
    }
    if (!reads()) scatter();
    asker_->of = this;
  }
  Asking(const Asking&) = delete;
  Asking& operator=(const Asking&) = delete;

  std::shared_ptr<Request> request(double now_s = 0.0) const {
    auto made = std::make_shared<Request>();
    made->op = op_;
    made->carries = op_ == Op::kPUSH || reads();
    made->began_s = now_s;
    made->deadline_s = now_s + kTimeoutS;
    made->table = entries_;
    made->memory = ranges_;
    for (const auto range : ranges_) made->memory_bytes += range.size();
    made->asker = asker_;
    return made;
  }
  uint64_t ask(Ends& ends, double now_s = 0.0) {
    const auto made = request(now_s);
    ends.session.ask(made, now_s);
    return made->number;
  }
  Bytes answer(uint64_t number, uint64_t version = 7) const {
    TestFrame made = reads() ? slices_ : TestFrame();
    made.op = Op{static_cast<uint8_t>(static_cast<uint8_t>(op_) + 1)};
    made.forge = [=](Header& header) {
      header.request = number;
      header.sequence = version;
    };
    return made.wire();
  }
  const Bytes& payload() const { return slices_.payload; }

  // A read's values are where they belong.
  bool arrived() const {
    Bytes all;
    for (const std::span<std::byte> range : ranges_) append(all, range);
    return all == slices_.payload;
  }
  bool untouched() const {
    return std::ranges::all_of(memory_, [](std::byte byte) { return byte == std::byte{0}; });
  }
  void forget() { asker_->is_forgotten = true; }
  void overwrite() { std::ranges::fill(memory_, std::byte{0xA5}); }

  std::vector<std::shared_ptr<Frame>> answers;

 private:
  struct Told final : Asker {
    bool forgotten() const override { return is_forgotten; }
    void answered(size_t /*part*/, std::shared_ptr<Frame> answer) override {
      of->answers.push_back(std::move(answer));
    }
    std::string body(double waited_s) const override {
      return waited_s > 0.0 ? std::to_string(waited_s) : "";
    }

    Asking* of = nullptr;
    bool is_forgotten = false;
  };

  bool reads() const { return op_ == Op::kPULL; }
  void scatter() {
    std::span<const std::byte> from = slices_.payload;
    for (const std::span<std::byte> range : ranges_) {
      std::ranges::copy(from.first(range.size()), range.begin());
      from = from.subspan(range.size());
    }
  }

  Op op_;
  TestFrame slices_;
  std::vector<SliceEntry> entries_;
  Bytes memory_;
  std::vector<std::span<std::byte>> ranges_;
  std::shared_ptr<Told> asker_ = std::make_shared<Told>();
};

Bytes joined(Bytes bytes, const Bytes& more) {
  append(bytes, more);
  return bytes;
}

// ---- answered ---------------------------------------------------------------------------------------

TEST(ClientSession, SendsWhatIsAskedAndReceivesTheAnswers) {
  Ends ends;
  Asking write(Op::kASSIGN, {100, 0, 7});
  Asking read(Op::kPULL, {30, 0, 5000});
  EXPECT_EQ(write.ask(ends), 1u);
  EXPECT_EQ(read.ask(ends), 2u);
  ends.reply(joined(write.answer(1, 3), read.answer(2, 7)));
  ASSERT_TRUE(ends.finishes());
  const auto sent = frames_of(ends.came());
  ASSERT_EQ(sent.size(), 2u);
  EXPECT_EQ(sent[0].header.op, Op::kASSIGN);
  EXPECT_EQ(sent[0].header.sequence, 1u);
  EXPECT_EQ(sent[0].payload, write.payload());
  EXPECT_EQ(sent[1].header.op, Op::kPULL);
  EXPECT_EQ(sent[1].header.sequence, 0u);
  EXPECT_EQ(sent[1].table.size(), 3u);
  EXPECT_TRUE(read.arrived());
  EXPECT_TRUE(ends.session.outgoing().done());
  EXPECT_TRUE(ends.session.is_quiet());
  EXPECT_EQ(ends.session.version, 7u);
  ASSERT_EQ(write.answers.size(), 1u);
  ASSERT_EQ(read.answers.size(), 1u);
  EXPECT_EQ(read.answers[0]->header.request, 2u);
}

TEST(ClientSession, LargePayloadsGoBothWaysWhileTheOtherEndReads) {
  Ends ends;
  Asking write(Op::kASSIGN, {1 << 19, 3, 100'000});
  Asking read(Op::kPULL, {3, 1 << 19, 100'000});
  write.ask(ends);
  read.ask(ends);
  const size_t num_bytes = ends.session.outgoing().num_bytes();
  std::thread other([&] {
    EXPECT_EQ(frames_of(ends.read(num_bytes)).at(0).payload, write.payload());
    ends.reply(joined(write.answer(1), read.answer(2)));
  });
  EXPECT_TRUE(ends.finishes());
  EXPECT_TRUE(read.arrived());
  other.join();
}

TEST(ClientSession, MorePiecesThanOneSystemCallTakesAreSentInOrder) {
  Ends ends;
  Asking write(Op::kASSIGN, std::vector<uint32_t>(kMaxSlices, 3));
  write.ask(ends);
  EXPECT_EQ(ends.session.outgoing().pieces().size(), 1 + kMaxSlices);
  ends.reply(write.answer(1));
  Bytes came;
  for (int i = 0; i < 100 && !ends.drive(); ++i) append(came, ends.came());
  append(came, ends.came());
  EXPECT_EQ(frames_of(came).at(0).payload, write.payload());
}

TEST(Outgoing, RangesThatTouchAreOnePieceButNotWithTheHead) {
  Bytes memory = random_bytes(10);
  const std::vector<std::span<std::byte>> ranges{std::span(memory).first(4),
                                                 std::span(memory).subspan(4)};
  Outgoing outgoing;
  outgoing.add(Bytes(8), ranges);
  ASSERT_EQ(outgoing.pieces().size(), 2u);
  EXPECT_EQ(outgoing.num_bytes(), 18u);
  EXPECT_EQ(outgoing.pieces()[1].iov_len, 10u);
}

TEST(Outgoing, KeepsWhatIsNotSentAndLetsGoOfTheRest) {
  Outgoing outgoing;
  std::vector<std::weak_ptr<int>> owners;
  for (int i = 0; i < 4; ++i) {
    const auto owner = std::make_shared<int>(i);
    owners.emplace_back(owner);
    outgoing.add(Bytes(10, std::byte(i)), {}, owner);
  }
  EXPECT_EQ(outgoing.frames().size(), 4u);
  outgoing.sent(25);
  outgoing.tidy();
  EXPECT_EQ(outgoing.num_bytes(), 15u);
  EXPECT_TRUE(owners[0].expired());
  EXPECT_TRUE(owners[1].expired());
  EXPECT_FALSE(owners[2].expired());
  ASSERT_EQ(outgoing.pieces().size(), 2u);
  EXPECT_EQ(outgoing.pieces()[0].iov_len, 5u);
  EXPECT_EQ(*static_cast<std::byte*>(outgoing.pieces()[0].iov_base), std::byte{2});
  outgoing.sent(15);
  outgoing.tidy();
  EXPECT_TRUE(outgoing.done());
  EXPECT_TRUE(owners[3].expired());
}

TEST(ClientSession, TwoSessionsAreAnsweredInAnyOrder) {
  std::mt19937 random(1);
  for (int round = 0; round < 10; ++round) {
    Ends ends[2];
    std::vector<std::unique_ptr<Asking>> asked;
    std::vector<uint64_t> numbers;
    for (uint32_t i = 0; i < 6; ++i) {
      asked.push_back(std::make_unique<Asking>(i % 3 == 0 ? Op::kASSIGN : Op::kPULL,
                                               std::vector<uint32_t>{1000 * (i + 1), 1}));
      numbers.push_back(asked.back()->ask(ends[i % 2]));
    }
    std::vector<size_t> order{0, 1, 2, 3, 4, 5};
    std::ranges::shuffle(order, random);
    for (const size_t i : order) ends[i % 2].reply(asked[i]->answer(numbers[i]));
    ClientSession* const both[] = {&ends[0].session, &ends[1].session};
    bool all = false;
    for (int attempt = 0; attempt < 1000 && !all; ++attempt) all = drive(both, kNoWakeup, {});
    ASSERT_TRUE(all);
    for (ClientSession* const session : both) session->tell_answered();
    for (const auto& one : asked) {
      EXPECT_EQ(one->answers.size(), 1u);
      EXPECT_TRUE(one->arrived());
    }
  }
}

TEST(ClientSession, WhoIsBusyAsksAndDoesNotSleep) {
  Ends ends;
  Asking read(Op::kPULL, {30});
  read.ask(ends);
  const long before = num_sleeps();
  EXPECT_FALSE(ends.drive(kNoWakeup, kQuiet));  // nobody answers
  EXPECT_EQ(num_sleeps(), before);
  EXPECT_FALSE(ends.drive());
  EXPECT_GT(num_sleeps(), before);
  ends.reply(read.answer(1));
  EXPECT_TRUE(ends.drive(kNoWakeup, kQuiet));
  EXPECT_TRUE(read.arrived());
}

TEST(ClientSession, AReadOfNothingIsAnsweredWithNothing) {
  Ends ends;
  Asking read(Op::kPULL, {});
  read.ask(ends);
  ends.reply(read.answer(1, 9));
  ASSERT_TRUE(ends.finishes());
  EXPECT_EQ(ends.session.version, 9u);
}

// ---- not taken, not all there -----------------------------------------------------------------------

TEST(ClientSession, WhatTheKernelDoesNotTakeStaysInOrder) {
  Ends ends;
  ends.narrow();
  Asking write(Op::kASSIGN, {5000, 1, 30'000});
  write.ask(ends);
  const Bytes whole = ends.unsent();
  Bytes came;
  while (!ends.session.outgoing().done()) {
    EXPECT_FALSE(ends.drive());
    const size_t before = came.size();
    append(came, ends.came());
    ASSERT_GT(came.size(), before);
    EXPECT_EQ(joined(came, ends.unsent()), whole);
  }
  ends.reply(write.answer(1));
  EXPECT_TRUE(ends.finishes());
}

TEST(ClientSession, SendingAloneTakesNoAnswer) {
  Ends ends;
  Asking write(Op::kASSIGN, {300});
  write.ask(ends);
  ends.reply(write.answer(1));
  EXPECT_TRUE(ends.session.send());
  EXPECT_TRUE(ends.session.outgoing().done());
  EXPECT_FALSE(ends.session.tell_answered());
  EXPECT_TRUE(ends.session.answer_is_near());
  EXPECT_TRUE(ends.finishes());
  EXPECT_FALSE(ends.session.answer_is_near());
}

TEST(ClientSession, AnAnswerBeforeAllIsSentIsNotTheEnd) {
  Ends ends;
  ends.narrow();
  Asking write(Op::kASSIGN, {30'000});
  write.ask(ends);
  const Bytes whole = ends.unsent();
  ends.reply(write.answer(1));
  EXPECT_FALSE(ends.drive());
  EXPECT_EQ(write.answers.size(), 1u);
  Bytes came;
  for (int i = 0; i < 100 && !ends.drive(); ++i) append(came, ends.came());
  append(came, ends.came());
  EXPECT_EQ(came, whole);
}

TEST(ClientSession, AnAnswerThatIsCutGoesOnWhereItStopped) {
  const size_t size = Asking(Op::kPULL, {100'000, 300}).answer(1).size();
  const size_t payload_begin = size - 100'300;
  for (const size_t cut : {size_t{1}, kHeaderBytes + 10, payload_begin + 1000, size - 10}) {
    Ends ends;
    Asking read(Op::kPULL, {100'000, 300});
    read.ask(ends);
    const Bytes answer = read.answer(1);
    ends.reply(std::span(answer).first(cut));
    EXPECT_FALSE(ends.drive());
    EXPECT_TRUE(read.answers.empty());
    EXPECT_FALSE(ends.session.is_quiet());
    ends.reply(std::span(answer).subspan(cut));
    ASSERT_TRUE(ends.finishes()) << "cut at " << cut;
    EXPECT_TRUE(read.arrived());
  }
}

TEST(ClientSession, ABellEndsTheWaitForAnAnswer) {
  Ends ends;
  Asking write(Op::kASSIGN, {100});
  write.ask(ends);
  const int wakeup_fd = eventfd(1, EFD_CLOEXEC);
  EXPECT_FALSE(ends.drive(wakeup_fd));
  close(wakeup_fd);
  EXPECT_EQ(frames_of(ends.came()).size(), 1u);
  ends.reply(write.answer(1));
  EXPECT_TRUE(ends.finishes());
}

TEST(ClientSession, ASocketWhoseRecvDoesNotSleepIsPolled) {
  Ends ends;
  EXPECT_EQ(fcntl(ends.ours, F_SETFL, O_NONBLOCK), 0);
  Asking write(Op::kASSIGN, {100});
  write.ask(ends);
  const size_t num_bytes = ends.session.outgoing().num_bytes();
  std::thread other([&] {
    ends.read(num_bytes);
    ends.reply(write.answer(1));
  });
  EXPECT_TRUE(ends.finishes());
  other.join();
}

TEST(ClientSession, WhoHasNoSocketTakesTheFramesAndFeedsTheAnswers) {
  const auto decisions = std::make_shared<TestDecisions>();
  ClientSession session(decisions);
  session.connected();
  session.welcomed(0, 0, 0.0);
  Asking write(Op::kASSIGN, {100, 7});
  Asking read(Op::kPULL, {300});
  session.ask(write.request(), 0.0);
  session.ask(read.request(), 0.0);
  EXPECT_EQ(session.outgoing().frames().size(), 2u);
  for (const std::byte byte : joined(write.answer(1), read.answer(2))) session.feed({&byte, 1});
  session.tell_answered();
  EXPECT_EQ(write.answers.size(), 1u);
  EXPECT_TRUE(read.arrived());
}

// ---- again ------------------------------------------------------------------------------------------

TEST(ClientSession, AWriteThatIsCancelledIsSentAndSaidAgainAsItWas) {
  Ends ends;
  ends.narrow();
  Asking first(Op::kASSIGN, {5000, 1, 30'000});
  Asking second(Op::kADD, {0, 30'000, 7});
  first.ask(ends);
  second.ask(ends);
  const Bytes whole = ends.unsent();
  EXPECT_FALSE(ends.drive());
  for (Asking* const one : {&first, &second}) one->forget();
  ends.session.keep_cancelled();
  for (Asking* const one : {&first, &second}) one->overwrite();
  Bytes came = ends.came();
  ASSERT_LT(came.size(), 30'000u);
  append(came, ends.sent());
  EXPECT_EQ(came, whole);
  ends.shut();
  ends.open();
  ends.session.send();
  const auto again = frames_of(ends.came());
  ASSERT_EQ(again.size(), 2u);
  EXPECT_EQ(again[0].payload, first.payload());
  EXPECT_EQ(again[1].payload, second.payload());
}

TEST(ClientSession, AWriteThatIsTakenInTheMiddleIsSentAsItWas) {
  Ends ends;
  ends.narrow();
  Asking write(Op::kASSIGN, {5000, 1, 30'000});
  write.ask(ends);
  const Bytes whole = ends.unsent();
  EXPECT_FALSE(ends.drive());
  ends.session.take(1);
  write.overwrite();
  EXPECT_EQ(ends.sent(), whole);
}

TEST(ClientSession, WhatWasNotAnsweredIsSaidAgainInOrder) {
  Ends ends;
  Asking first(Op::kASSIGN, {10});
  Asking second(Op::kPULL, {20});
  Asking third(Op::kADD, {30});
  first.ask(ends);
  second.ask(ends);
  third.ask(ends);
  ends.reply(second.answer(2));
  ends.drive();
  ends.shut();
  EXPECT_FALSE(ends.session.is_up());
  EXPECT_TRUE(ends.session.outgoing().done());
  Asking fourth(Op::kPULL, {40});
  fourth.ask(ends);  // while there is no connection
  ends.open();
  ends.session.send();
  const auto sent = frames_of(ends.came());
  ASSERT_EQ(sent.size(), 3u);
  EXPECT_EQ(sent[0].header.request, 1u);
  EXPECT_EQ(sent[0].payload, first.payload());
  EXPECT_EQ(sent[1].header.request, 3u);
  EXPECT_EQ(sent[1].payload, third.payload());
  EXPECT_EQ(sent[2].header.request, 4u);
  EXPECT_EQ(second.answers.size(), 1u);
}

TEST(ClientSession, WritesThatTheShardHasNotTakenCloseTheGapsBeforeThem) {
  Ends ends;
  std::vector<std::unique_ptr<Asking>> writes;
  for (int i = 0; i < 4; ++i) {
    writes.push_back(std::make_unique<Asking>(Op::kADD, std::vector<uint32_t>{4}));
    writes.back()->ask(ends);
  }
  ends.session.take(2);  // given up: sequence 2 never came
  ends.shut();
  ends.open(/*last_sequence=*/1);
  ends.session.send();
  const auto sent = frames_of(ends.came());
  ASSERT_EQ(sent.size(), 3u);
  EXPECT_EQ(sent[0].header.sequence, 1u);  // it has that, and will say so
  EXPECT_EQ(sent[1].header.sequence, 2u);
  EXPECT_EQ(sent[2].header.sequence, 3u);
  EXPECT_EQ(ends.session.last_write, 3u);
}

TEST(ClientSession, ARequestThatIsSaidAgainWaitsForWhatIsLeftOfItsTime) {
  Ends ends;
  Asking read(Op::kPULL, {20});
  const auto request = read.request(/*now_s=*/100.0);
  request->at_least = 5;
  request->wait_s = 8.0;
  ends.session.ask(request, 100.0);
  ends.session.send();
  EXPECT_EQ(parse_carry(frames_of(ends.came()).at(0).body).wait_s, 8.0);
  ends.session.disconnected();
  ends.session.connected();
  ends.session.open(ends.ours);
  ends.session.welcomed(0, 0, 103.0);
  ends.session.send();
  const Carry again = parse_carry(frames_of(ends.came()).at(0).body);
  EXPECT_EQ(again.wait_s, 5.0);
  EXPECT_EQ(again.at_least, 5u);
}

TEST(ClientSession, ABodyThatIsNoCarryIsItsAskers) {
  Ends ends;
  Asking asking(Op::kASSIGN, {});
  const auto request = asking.request(100.0);
  request->op = Op::kCOMMIT;
  ends.session.ask(request, 102.0);
  ends.session.send();
  EXPECT_EQ(frames_of(ends.came()).at(0).body, std::to_string(2.0));
}

TEST(ClientSession, WhatIsNoFrameIsRefusedAndLeavesNoTrace) {
  Ends ends;
  Asking write(Op::kASSIGN, {20});
  const auto request = write.request();
  const std::vector<SliceEntry> other{{.key = 1, .num_bytes = 21}};
  request->table = other;
  EXPECT_THROW(ends.session.ask(request, 0.0), Error);
  EXPECT_TRUE(ends.session.is_quiet());
  EXPECT_EQ(write.ask(ends), 1u);
  ends.session.send();
  EXPECT_EQ(frames_of(ends.came()).at(0).header.sequence, 1u);
}

// ---- decisions --------------------------------------------------------------------------------------

TEST(ClientSession, DecisionsAreCarriedOnceOnEachConnection) {
  Ends ends;
  Asking push(Op::kPUSH, {10});
  Asking write(Op::kASSIGN, {10});
  EXPECT_FALSE(ends.session.has_news());
  ends.decisions->last = 3;
  EXPECT_TRUE(ends.session.has_news());
  write.ask(ends);  // carries nothing
  push.ask(ends);
  push.ask(ends);
  ends.session.send();
  const auto sent = frames_of(ends.came());
  EXPECT_TRUE(sent.at(0).body.empty());
  EXPECT_EQ(parse_carry(sent.at(1).body).newest, 3u);
  EXPECT_TRUE(sent.at(1).body.ends_with("signed"));
  EXPECT_TRUE(sent.at(2).body.empty());
  EXPECT_EQ(ends.decisions->asked, std::vector<uint64_t>{0});
  ends.shut();
  ends.open();
  ends.session.send();
  EXPECT_EQ(parse_carry(frames_of(ends.came()).at(1).body).newest, 3u);
}

TEST(ClientSession, AScaleIsToldUntilThereIsAnotherDecision) {
  Ends ends;
  Asking read(Op::kPULL, {});
  ends.decisions->last = 2;
  ends.decisions->is_scaled = true;
  read.ask(ends);
  read.ask(ends);
  ends.session.send();
  for (const Sent& sent : frames_of(ends.came())) {
    EXPECT_EQ(parse_carry(sent.body).scaled, 2u);
    EXPECT_EQ(parse_carry(sent.body).factor, 0.5);
  }
  ends.reply(read.answer(1));
  ends.drive();
  EXPECT_EQ(ends.session.scaled, 2u);
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
TEST_P(OtherFrames, AreLeftToWhoeverDrivesTheSession) {
  Ends ends;
  Asking write(Op::kASSIGN, {100});
  Asking read(Op::kPULL, {300});
  write.ask(ends);
  read.ask(ends);
  TestFrame other = GetParam().frame;
  other.forge = [](Header& header) { header.request = GetParam().request; };
  ends.reply(joined(joined(read.answer(2), other.wire()), write.answer(1)));
  EXPECT_FALSE(ends.drive());
  EXPECT_EQ(read.answers.size(), 1u);
  EXPECT_TRUE(write.answers.empty());
  const std::shared_ptr<Frame> frame = ends.session.next_frame();
  ASSERT_NE(frame, nullptr);
  EXPECT_EQ(frame->header.op, other.op);
  EXPECT_EQ(frame->complete, other.payload.empty());
  if (!frame->complete) ends.session.decoder().discard();
  while (const auto next = ends.session.next_frame()) EXPECT_EQ(next, frame);
  ends.session.tell_answered();
  EXPECT_GE(write.answers.size(), 1u);  // what came behind it
}

TestFrame frame_with(Op op, const std::vector<uint32_t>& sizes = {}) {
  TestFrame frame = TestFrame::with_slices(sizes);
  frame.op = op;
  return frame;
}

INSTANTIATE_TEST_SUITE_P(
    ClientSession, OtherFrames,
    ::testing::Values(OtherFrame{"AnError", frame_with(Op::kERROR)},
                      OtherFrame{"AnAnswerNobodyWaitsFor", frame_with(Op::kASSIGNED), 9},
                      OtherFrame{"APayloadNobodyWaitsFor", frame_with(Op::kPULLED, {300}), 9},
                      OtherFrame{"AnotherOperationsAnswer", frame_with(Op::kPULLED, {100})},
                      OtherFrame{"APayloadWithoutAPlace", frame_with(Op::kASSIGNED, {100})},
                      OtherFrame{"ASecondAnswer", frame_with(Op::kPULLED, {300}), 2}),
    [](const auto& frame) { return frame.param.name; });

TEST(ClientSession, AnAnswerByHandIsLeftToWhoeverDrivesIt) {
  Ends ends;
  Asking read(Op::kPULL, {300});
  const auto request = read.request();
  request->kind = Request::Kind::kByHand;
  ends.session.ask(request, 0.0);
  ends.reply(read.answer(1));
  EXPECT_FALSE(ends.drive());
  const std::shared_ptr<Frame> frame = ends.session.next_frame();
  ASSERT_NE(frame, nullptr);
  EXPECT_FALSE(frame->complete);
  EXPECT_NE(ends.session.request(1), nullptr);
}

TEST(ClientSession, WhatComesForAForgottenReadGoesNowhere) {
  Ends ends;
  Asking read(Op::kPULL, {300});
  read.ask(ends);
  read.forget();
  ends.reply(read.answer(1));
  ASSERT_TRUE(ends.finishes());
  EXPECT_TRUE(read.untouched());
}

TEST(ClientSession, WhatIsMissingOfAReadThatIsForgottenInTheMiddleGoesNowhere) {
  Ends ends;
  Asking read(Op::kPULL, {100'000});
  read.ask(ends);
  const Bytes answer = read.answer(1);
  ends.reply(std::span(answer).first(50'000));
  EXPECT_FALSE(ends.drive());
  EXPECT_FALSE(read.untouched());
  read.forget();
  ends.reply(std::span(answer).subspan(50'000));
  ASSERT_TRUE(ends.finishes());
  EXPECT_FALSE(read.arrived());
}

TEST(ClientSession, ARequestThatIsTakenInTheMiddleOfItsAnswerKeepsItsMemory) {
  Ends ends;
  auto read = std::make_unique<Asking>(Op::kPULL, std::vector<uint32_t>{100'000});
  read->ask(ends);
  const Bytes answer = read->answer(1);
  ends.reply(std::span(answer).first(50'000));
  EXPECT_FALSE(ends.drive());
  const std::weak_ptr<Request> taken = ends.session.take(1);
  EXPECT_FALSE(taken.expired());
  ends.reply(std::span(answer).subspan(50'000));
  for (int i = 0; i < 100 && !taken.expired(); ++i) {
    ends.drive();
    if (const auto frame = ends.session.next_frame()) {
      EXPECT_TRUE(frame->complete);
    }
    ends.session.tidy();
  }
  EXPECT_TRUE(taken.expired());
}

// ---- a connection ends ------------------------------------------------------------------------------

// The error that the session will say again.
ErrorCode broken(ClientSession& session) {
  try {
    session.next_frame();
  } catch (const Error& error) {
    return error.code();
  }
  return ErrorCode::OK;
}

TEST(ClientSession, BytesThatAreNoFrameEndItAndItSaysWhy) {
  Ends ends;
  Asking read(Op::kPULL, {300});
  read.ask(ends);
  ends.reply(random_bytes(200));
  EXPECT_FALSE(ends.drive());
  EXPECT_EQ(broken(ends.session), ErrorCode::BAD_MAGIC);
  EXPECT_FALSE(ends.drive());
}

TEST(ClientSession, AnAnswerOfOtherSizesGoesNowhere) {
  for (const std::vector<uint32_t>& sizes : {std::vector<uint32_t>{301}, {150, 150}, {}}) {
    Ends ends;
    Asking read(Op::kPULL, {300});
    read.ask(ends);
    TestFrame answer = frame_with(Op::kPULLED, sizes);
    if (sizes.empty()) answer.payload = random_bytes(300);
    answer.forge = [](Header& header) { header.request = 1; };
    ends.reply(answer.wire());
    EXPECT_FALSE(ends.drive());
    EXPECT_EQ(broken(ends.session), ErrorCode::BAD_HEADER);
    EXPECT_TRUE(read.untouched());
  }
}

TEST(ClientSession, AnAnswerWithoutAValueThatItSaysIsThereGoesNowhere) {
  for (const std::vector<uint32_t>& sizes : {std::vector<uint32_t>{300, 0}, {0, 0}, {0}, {}}) {
    Ends ends;
    Asking read(Op::kPULL, {300, 4});
    read.ask(ends);
    TestFrame answer = frame_with(Op::kPULLED, sizes);
    answer.forge = [](Header& header) { header.request = 1; };
    ends.reply(answer.wire());
    EXPECT_FALSE(ends.drive());
    EXPECT_EQ(broken(ends.session), ErrorCode::BAD_HEADER);
    EXPECT_TRUE(read.answers.empty());
  }
}

TEST(ClientSession, AChecksumThatIsWrongIsNoAnswer) {
  Ends ends;
  Asking read(Op::kPULL, {300});
  read.ask(ends);
  Bytes answer = read.answer(1);
  answer.back() ^= std::byte{1};
  ends.reply(answer);
  EXPECT_FALSE(ends.drive());
  EXPECT_EQ(broken(ends.session), ErrorCode::BAD_CHECKSUM);
  EXPECT_TRUE(read.answers.empty());
  EXPECT_NE(ends.session.request(1), nullptr);
}

TEST(ClientSession, PayloadsHaveChecksumsWhereTheSpeakerWantsThem) {
  for (const bool wants : {false, true}) {
    Ends ends;
    ends.session.speaker = {.rank = 3, .incarnation = 4, .checksum = wants};
    Asking write(Op::kASSIGN, {100});
    write.ask(ends);
    ends.session.send();
    const Sent sent = frames_of(ends.came()).at(0);
    EXPECT_EQ((sent.header.flags & kFlagChecksum) != 0, wants);
    EXPECT_EQ(sent.header.rank, 3u);
    EXPECT_EQ(sent.header.incarnation, 4u);
  }
}

TEST(ClientSession, NothingIsSentToAnEndThatIsGone) {
  Ends ends;
  ends.hang_up();
  Asking write(Op::kASSIGN, {100});
  write.ask(ends);
  const Bytes whole = ends.unsent();
  EXPECT_FALSE(ends.drive());
  EXPECT_EQ(ends.unsent(), whole);
}

TEST(ClientSession, AnEndThatGoesInTheMiddleOfAnAnswerIsALostConnection) {
  Ends ends;
  Asking read(Op::kPULL, {300});
  read.ask(ends);
  ends.session.send();
  const Bytes answer = read.answer(1);
  ends.reply(std::span(answer).first(answer.size() - 1));
  ends.hang_up();
  auto received = ClientSession::Received::kAll;
  while (received == ClientSession::Received::kAll) {
    received = ends.session.receive(16, /*may_sleep=*/false);
  }
  EXPECT_EQ(received, ClientSession::Received::kLost);
  EXPECT_TRUE(read.answers.empty());
}

// ---- shared memory ----------------------------------------------------------------------------------

// What a shard and its client share.
struct SharedMemory {
  std::shared_ptr<ValueArena> values = std::make_shared<ValueArena>(16u << 20);
  std::shared_ptr<PushArena> pushes = PushArena::create(4 * kPushBlockBytes);
  std::shared_ptr<ClientMemory> client = std::make_shared<ClientMemory>(
      values->readonly_file().get(), pushes->file().get(), pushes->control_file().get());

  // The answer to the first request: so many bytes are read where they lie.
  TestFrame lent(const Buffer& value, uint32_t num_bytes) const {
    TestFrame answer = frame_with(Op::kPULLED, {num_bytes});
    answer.payload.clear();
    answer.checksum = false;
    answer.forge_entry = [begin = *values->offset_of(value.data())](SliceEntry& entry) {
      entry.offset = begin;
    };
    answer.forge = [num_bytes](Header& header) {
      header.request = 1;
      header.flags |= kFlagShared;
      header.payload_bytes = num_bytes;
    };
    return answer;
  }
};

TEST(ClientSession, LargePayloadsLieInSharedMemoryAndSmallOnesAreSent) {
  Ends ends;
  SharedMemory shared;
  ends.session.share(shared.client, 1000);
  Asking small(Op::kASSIGN, {999});
  Asking large(Op::kASSIGN, {900, 100});
  Asking read(Op::kPULL, {1000});
  small.ask(ends);
  large.ask(ends);
  read.ask(ends);
  ends.session.send();
  const auto sent = frames_of(ends.came());
  ASSERT_EQ(sent.size(), 3u);
  EXPECT_EQ(sent[0].payload, small.payload());
  EXPECT_TRUE(sent[1].header.is_shared());
  EXPECT_TRUE(sent[1].payload.empty());
  const BufferRef there = shared.pushes->range_of(sent[1].table, sent[1].header.request);
  EXPECT_TRUE(std::ranges::equal(large.payload(), std::span(there->data(), there->size())));
  EXPECT_TRUE(sent[2].header.is_shared());
}

TEST(ClientSession, WhatWasReadInSharedMemoryIsToldAtOnceOrWithTheNextRequest) {
  for (const bool keeps : {false, true}) {
    Ends ends;
    SharedMemory shared;
    ends.session.share(shared.client, 100);
    ends.session.speaker.keeps_releases = keeps;
    const BufferRef value = BufferPool::create(0, shared.values)->allocate(kLargeBlockBytes);
    Asking read(Op::kPULL, {1000});
    std::ranges::copy(read.payload(), value->data());
    read.ask(ends);
    ends.reply(shared.lent(*value, 1000).wire());
    ASSERT_TRUE(ends.finishes());
    EXPECT_TRUE(read.arrived());
    EXPECT_EQ(ends.session.num_releases(), 1u);
    ends.came();
    EXPECT_EQ(ends.session.release_if_due(), !keeps);
    if (keeps) read.ask(ends);
    ends.session.send();
    const auto sent = frames_of(ends.came());
    ASSERT_FALSE(sent.empty());
    EXPECT_EQ(sent[0].header.op, Op::kRELEASE);
    EXPECT_EQ(sent[0].header.request, 1u);
    EXPECT_EQ(ends.session.num_releases(), 0u);
  }
}

TEST(ClientSession, WhatWasReadInMemoryOfAShardThatHasHungUpIsNoAnswer) {
  Ends ends;
  SharedMemory shared;
  ends.session.share(shared.client, 100);
  const BufferRef value = BufferPool::create(0, shared.values)->allocate(kLargeBlockBytes);
  Asking read(Op::kPULL, {1000});
  read.ask(ends);
  ends.session.send();
  ends.reply(shared.lent(*value, 1000).wire());
  EXPECT_FALSE(ends.session.link().is_hung_up());
  ends.hang_up();
  EXPECT_TRUE(ends.session.link().is_hung_up());
  EXPECT_FALSE(ends.finishes());
  EXPECT_TRUE(read.answers.empty());
  EXPECT_EQ(ends.session.requests().size(), 1u);  // the next connection's
}

TEST(ClientSession, AnAnswerInMemoryThatIsNotSharedIsLeft) {
  Ends ends;
  Asking read(Op::kPULL, {300});
  read.ask(ends);
  TestFrame shared = frame_with(Op::kPULLED, {300});
  shared.payload.clear();
  shared.checksum = false;
  shared.forge = [](Header& header) {
    header.request = 1;
    header.flags |= kFlagShared;
    header.payload_bytes = 300;
  };
  ends.reply(shared.wire());
  EXPECT_FALSE(ends.drive());
  const auto frame = ends.session.next_frame();
  ASSERT_NE(frame, nullptr);
  EXPECT_TRUE(frame->header.is_shared());
  EXPECT_TRUE(read.untouched());
}

TEST(ClientSession, AnAnswerThatLiesOutsideTheSharedMemoryEndsTheConnection) {
  Ends ends;
  SharedMemory shared;
  ends.session.share(shared.client, 100);
  Asking read(Op::kPULL, {300});
  read.ask(ends);
  TestFrame answer = frame_with(Op::kPULLED, {300});
  answer.payload.clear();
  answer.checksum = false;
  answer.forge_entry = [](SliceEntry& entry) { entry.offset = uint64_t{1} << 60; };
  answer.forge = [](Header& header) {
    header.request = 1;
    header.flags |= kFlagShared;
    header.payload_bytes = 300;
  };
  ends.reply(answer.wire());
  EXPECT_FALSE(ends.drive());
  EXPECT_EQ(broken(ends.session), ErrorCode::BAD_HEADER);
  EXPECT_TRUE(read.untouched());
}

// ---- rules that the simulator breaks ----------------------------------------------------------------

class BrokenRule {
 public:
  explicit BrokenRule(BreakableRule rule) {
    broken_rules = uint64_t{1} << static_cast<uint32_t>(rule);
  }
  BrokenRule(const BrokenRule&) = delete;
  BrokenRule& operator=(const BrokenRule&) = delete;
  ~BrokenRule() { broken_rules = 0; }
};

TEST(ClientSession, SaysNothingAgainIfThatRuleIsBroken) {
  const BrokenRule broken(BreakableRule::kTHE_UNANSWERED_IS_SENT_AGAIN);
  Ends ends;
  Asking write(Op::kASSIGN, {10});
  write.ask(ends);
  ends.shut();
  ends.open();
  EXPECT_TRUE(ends.session.outgoing().done());
}

}  // namespace
}  // namespace psstore::testing
