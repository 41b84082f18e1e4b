// Poller: over pairs of sockets whose other ends are the test's.
#include "server/poller.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <map>
#include <thread>

#include "request_support.h"
#include "shm/value_arena.h"
#include "sleeps.h"

namespace psstore::testing {
namespace {

using namespace std::chrono_literals;

constexpr Key kSmall = make_key(1, 0);
constexpr Key kLarge = make_key(2, 0);
constexpr Key kEmpty = make_key(3, 0);
constexpr size_t kLargeElems = 1u << 20;  // more than a pair of sockets holds

// A connection to the poller of which the test is the client.
class Client {
 public:
  Client(DataService& service, uint64_t connection) : protocol(decoder, service, connection) {
    int fds[2] = {-1, -1};
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    ours_ = Descriptor(fds[0]);
    theirs_ = Descriptor(fds[1]);
    protocol.open("a", false);
  }

  Descriptor socket() { return std::move(theirs_); }
  void hang_up() { ours_ = Descriptor(); }
  void say_no_more() { EXPECT_EQ(shutdown(ours_.get(), SHUT_WR), 0); }

  void send(std::span<const std::byte> bytes) {
    ASSERT_EQ(::send(ours_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  // As many of them as there is room for.
  size_t send_some(std::span<const std::byte> bytes) {
    const ssize_t taken =
        ::send(ours_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    return taken < 0 ? 0 : static_cast<size_t>(taken);
  }
  // What has come, as frames. Sets `ended` if nothing more will.
  std::vector<std::shared_ptr<Frame>> frames() {
    std::vector<std::shared_ptr<Frame>> all;
    for (;;) {
      const std::span<std::byte> window = received_.writable().bytes;
      const ssize_t size = recv(ours_.get(), window.data(), window.size(), MSG_DONTWAIT);
      ended = size == 0;
      if (size <= 0) return all;
      received_.written(static_cast<size_t>(size));
      num_received += static_cast<size_t>(size);
      while (std::shared_ptr<Frame> frame = received_.next_frame()) {
        if (frame->complete) {
          all.push_back(std::move(frame));
        } else {
          received_.accept(pool_->allocate(frame->header.payload_bytes));
        }
      }
    }
  }

  FrameDecoder decoder;  // of the poller's end
  ServerProtocol protocol;
  bool ended = false;
  size_t num_received = 0;

 private:
  Descriptor ours_, theirs_;
  FrameDecoder received_;
  std::shared_ptr<BufferPool> pool_ = make_pool();
};

Bytes read_of(Key key, uint64_t request = 1) {
  return wire({.op = Op::kPULL, .slices = {{key, {}}}, .request = request});
}
Bytes write_of(Floats values, uint64_t sequence) {
  return wire({.op = Op::kASSIGN, .slices = {{kSmall, values}}, .sequence = sequence});
}
const Bytes kForOthers = TestFrame{.op = Op::kJOIN, .checksum = false}.wire();

class PollerTest : public ::testing::Test {
 protected:
  PollerTest() {
    shard_.define({1, DType::kFloat32, RuleKind::kAssign, 0, true, {{kSmall, 2}}});
    shard_.define({2, DType::kFloat32, RuleKind::kAssign, 0, true, {{kLarge, kLargeElems}}});
    shard_.define({3, DType::kFloat32, RuleKind::kAssign, 0, false, {{kEmpty, 2}}});
  }
  ~PollerTest() override { close(bell_); }

  Client& connect(Poller::Id id, size_t send_buffer_bytes = 0) {
    Client& client = clients_.try_emplace(id, service_, id).first->second;
    Descriptor socket = client.socket();
    if (const int size = static_cast<int>(send_buffer_bytes)) {
      EXPECT_EQ(setsockopt(socket.get(), SOL_SOCKET, SO_SNDBUF, &size, sizeof size), 0);
    }
    poller_.add(id, std::move(socket), nullptr, client.decoder, client.protocol);
    return client;
  }
  Piece piece_of(std::span<const std::byte> bytes) {
    BufferRef buffer = pool_->allocate(bytes.size());
    std::memcpy(buffer->data(), bytes.data(), bytes.size());
    return {std::move(buffer), bytes.size()};
  }
  static std::shared_ptr<Frame> frame_of(const std::optional<Poller::Event>& event) {
    if (!event || event->what.index() != 0) return nullptr;
    return std::get<std::shared_ptr<Frame>>(event->what);
  }
  static bool is_gone(const std::optional<Poller::Event>& event, Poller::Id id) {
    return event && event->id == id && std::holds_alternative<Poller::Gone>(event->what);
  }

  // Within so many milliseconds.
  bool is_called(int timeout_ms) const {
    pollfd file{poller_.fileno(), POLLIN, 0};
    return poll(&file, 1, timeout_ms) == 1;
  }

  Shard shard_{ShardOptions()};
  DataService service_{shard_};
  std::map<Poller::Id, Client> clients_;
  std::shared_ptr<BufferPool> pool_ = make_pool();
  int bell_ = eventfd(0, EFD_CLOEXEC);
  Poller poller_{service_, bell_};
};

TEST_F(PollerTest, OrdinaryRequestsOfAllConnectionsAreAnsweredInOneTurn) {
  Client& writer = connect(1);
  Client& reader = connect(2);
  writer.send(write_of({1, 2}, 1));
  for (const uint64_t request : {7u, 8u}) reader.send(read_of(kSmall, request));
  EXPECT_FALSE(poller_.turn(0s));
  EXPECT_EQ(writer.frames().at(0)->header.op, Op::kASSIGNED);
  const auto replies = reader.frames();
  ASSERT_EQ(replies.size(), 2u);
  EXPECT_EQ(replies[1]->header.request, 8u);
  EXPECT_EQ(floats_of(replies[1]->payload), (Floats{1, 2}));
}

TEST_F(PollerTest, WhatOthersAnswerKeepsItsPlaceAmongTheReplies) {
  Client& client = connect(1);
  Bytes requests = read_of(kSmall, 1);
  append(requests, kForOthers);
  append(requests, read_of(kSmall, 3));
  client.send(requests);
  const auto event = poller_.turn(0s);
  ASSERT_NE(frame_of(event), nullptr);
  EXPECT_EQ(frame_of(event)->header.op, Op::kJOIN);
  Replies::Parts pieces;
  pieces.emplace_back(piece_of(TestFrame{.op = Op::kJOINED, .checksum = false}.wire()));
  poller_.send(1, std::move(pieces));
  EXPECT_FALSE(poller_.turn(0s));
  std::vector<Op> ops;
  for (const auto& frame : client.frames()) ops.push_back(frame->header.op);
  EXPECT_EQ(ops, (std::vector{Op::kPULLED, Op::kJOINED, Op::kPULLED}));
}

// Replies are small there, and are taken for as large as what is read.
TEST(PollerInSharedMemoryTest, RequestsGoOnThatCameBehindRepliesWhichWaitedForTheStandby) {
  constexpr uint64_t kNumRequests = 5;
  constexpr uint64_t kNumElems = 64u << 10;  // as many bytes as may wait
  Shard shard({.arena = std::make_shared<ValueArena>(16u << 20)});
  shard.define({1, DType::kFloat32, RuleKind::kAssign, 0, true, {{kSmall, kNumElems}}});
  DataService service(shard);
  Poller poller(service, -1);
  Client standby(service, 1), client(service, 2);
  for (Client* one : {&standby, &client}) {
    poller.add(one == &standby ? 1 : 2, one->socket(), nullptr, one->decoder, one->protocol);
  }
  standby.protocol.follow();
  service.replication().count(1);
  service.record("a change");
  client.protocol.client().arenas.push_back(PushArena::create(kPushBlockBytes));
  Bytes requests;
  for (uint64_t i = 1; i <= kNumRequests; ++i) {
    const std::vector<SliceEntry> table{{.key = kSmall}};
    const std::string body = carry(0);
    const std::string asked = head_of({.op = Op::kPULL,
                                       .shared = true,
                                       .request = i,
                                       .table = table,
                                       .body = std::as_bytes(std::span(body))});
    append(requests, std::as_bytes(std::span(asked)));
  }
  client.send(requests);
  EXPECT_FALSE(poller.turn(0s));
  EXPECT_TRUE(client.frames().empty());
  service.replication().acknowledged(1, 1);
  poller.deliver();
  size_t num_replies = client.frames().size();
  pollfd file{poller.fileno(), POLLIN, 0};
  while (num_replies < kNumRequests && poll(&file, 1, 1000) == 1) {
    EXPECT_FALSE(poller.turn(0s));
    num_replies += client.frames().size();
  }
  EXPECT_EQ(num_replies, kNumRequests);
}

TEST_F(PollerTest, WhoSaysLittleGoesBeforeWhoSendsInBulk) {
  Client& bulk = connect(1);
  Client& small = connect(2);
  for (int i = 0; i < 100; ++i) bulk.send(kForOthers);
  while (poller_.turn(0s)) {
  }
  bulk.send(kForOthers);  // it is ready before the other one
  small.send(kForOthers);
  EXPECT_EQ(poller_.turn(0s)->id, 2u);
  EXPECT_EQ(poller_.turn(0s)->id, 1u);
}

TEST_F(PollerTest, ATurnSendsNoMoreThanARoundsShare) {
  Client& reader = connect(1, /*send_buffer_bytes=*/4 * kRoundBytes);  // or as much as there may be
  reader.send(read_of(kLarge));
  size_t before = 0;
  for (int turn = 0; turn < 8; ++turn) {
    EXPECT_FALSE(poller_.turn(0s));
    reader.frames();
    EXPECT_LE(reader.num_received - before, kRoundBytes);
    EXPECT_GT(reader.num_received, before);
    before = reader.num_received;
  }
}

TEST_F(PollerTest, WhoPushesHasHalfHoweverManyPull) {
  constexpr uint64_t kNumReaders = 8;
  Client& writer = connect(kNumReaders);
  const Bytes written =
      wire({.op = Op::kASSIGN, .slices = {{kLarge, Floats(kLargeElems)}}, .sequence = 1});
  std::vector<Client*> readers;
  for (uint64_t id = 0; id < kNumReaders; ++id) {
    readers.push_back(&connect(id));
    readers.back()->send(read_of(kLarge));
  }
  auto to_send = std::span(written);
  const auto go_on = [&](int num_turns) {
    const size_t before = to_send.size();
    for (int turn = 0; turn < num_turns; ++turn) {
      to_send = to_send.subspan(writer.send_some(to_send));
      EXPECT_FALSE(poller_.turn(0s));
      for (Client* reader : readers) reader->frames();
    }
    return before - to_send.size();
  };
  go_on(2);  // until it is known who moves bulk
  for (Client* reader : readers) reader->num_received = 0;
  const size_t pushed = go_on(16);
  size_t pulled = 0;
  for (const Client* reader : readers) pulled += reader->num_received;
  EXPECT_GT(pushed, 2u << 20);
  EXPECT_GT(pulled, 2u << 20);
  EXPECT_LT(pulled, pushed + pushed / 2);
  for (const Client* reader : readers) {
    EXPECT_LT(reader->num_received, pulled / kNumReaders + kRoundBytes);
    EXPECT_GT(reader->num_received, 0u);
  }
}

TEST_F(PollerTest, WhoDoesNotReadIsNotReadFromAndMissesNothing) {
  Client& reader = connect(1);
  Client& other = connect(2);
  for (uint64_t request = 1; request <= 3; ++request) reader.send(read_of(kLarge, request));
  reader.send(kForOthers);
  EXPECT_FALSE(poller_.turn(0s));  // what it has to say comes after replies that it does not read
  other.send(read_of(kSmall));
  EXPECT_FALSE(poller_.turn(0s));
  EXPECT_EQ(other.frames().size(), 1u);
  uint64_t answered = 0;
  for (std::optional<Poller::Event> event; !event; event = poller_.turn(0s)) {
    for (const auto& frame : reader.frames()) EXPECT_EQ(frame->header.request, ++answered);
  }
  EXPECT_GE(answered, 2u);
}

TEST_F(PollerTest, RequestsThatWaitGoOnWhenEverTheirPeerReads) {
  constexpr uint64_t kNumReads = 32;
  Client& reader = connect(1);
  for (uint64_t request = 1; request <= kNumReads; ++request) {
    reader.send(read_of(kLarge, request));
  }
  std::thread other([&] {
    size_t answered = 0;
    while (answered < kNumReads && !reader.ended) answered += reader.frames().size();
    reader.hang_up();
  });
  bool called = true;
  while (called && !poller_.turn(0s)) called = is_called(10'000);  // its end is the first event
  EXPECT_TRUE(called);
  if (!called) poller_.drop(1);
  other.join();
}

TEST_F(PollerTest, WhoSaysNoMoreGetsHisRepliesFirst) {
  Client& client = connect(1);
  client.send(read_of(kLarge));
  client.say_no_more();
  std::optional<Poller::Event> event;
  size_t answered = 0;
  while (!(event = poller_.turn(0s))) answered += client.frames().size();
  EXPECT_TRUE(is_gone(event, 1));
  EXPECT_EQ(std::get<Poller::Gone>(event->what).error, 0);
  EXPECT_EQ(answered + client.frames().size(), 1u);
  EXPECT_TRUE(client.ended);
}

TEST_F(PollerTest, WhoGoesAwayWithoutReadingIsGone) {
  Client& client = connect(1);
  client.send(read_of(kLarge));
  EXPECT_FALSE(poller_.turn(0s));
  client.hang_up();
  EXPECT_TRUE(is_gone(poller_.turn(0s), 1));
}

TEST_F(PollerTest, WhoGoesAwayWhileNobodyIsHeardCallsNobodyAgainAndAgain) {
  Client& client = connect(1);
  client.protocol.freeze_with_shard();
  service_.freeze(true);
  client.send(read_of(kSmall));
  client.hang_up();
  EXPECT_FALSE(poller_.turn(0s));
  EXPECT_FALSE(poller_.turn(0s));
  EXPECT_FALSE(is_called(50));
}

TEST_F(PollerTest, AClosedConnectionSendsWhatIsLeftAndListensToNothing) {
  Client& client = connect(1);
  client.send(read_of(kLarge));
  EXPECT_FALSE(poller_.turn(0s));
  poller_.close(1);
  client.send(kForOthers);
  size_t answered = 0;
  while (!client.ended) {
    EXPECT_FALSE(poller_.turn(0s));
    answered += client.frames().size();
  }
  EXPECT_EQ(answered, 1u);
  client.hang_up();
  EXPECT_TRUE(is_gone(poller_.turn(0s), 1));
}

TEST_F(PollerTest, ADroppedConnectionIsNotHeardOfAgain) {
  Client& client = connect(1);
  client.send(kForOthers);
  client.send(kForOthers);
  ASSERT_NE(frame_of(poller_.turn(0s)), nullptr);
  poller_.drop(1);
  EXPECT_FALSE(poller_.turn(0s));
  client.frames();
  EXPECT_TRUE(client.ended);
}

TEST_F(PollerTest, BadBytesAreOneConnectionsEvent) {
  Client& bad = connect(1);
  Client& good = connect(2);
  bad.send(random_bytes(100));
  good.send(read_of(kSmall));
  const auto event = poller_.turn(0s);
  ASSERT_TRUE(event && event->id == 1);
  EXPECT_THROW(std::rethrow_exception(std::get<std::exception_ptr>(event->what)), Error);
  poller_.close(1);
  EXPECT_FALSE(poller_.turn(0s));
  EXPECT_EQ(good.frames().size(), 1u);
}

TEST_F(PollerTest, ATurnLingersForRequests) {
  Client& client = connect(1);
  std::thread other([&] {
    for (int i = 0; i < 3; ++i) {
      client.send(read_of(kSmall));
      while (client.frames().empty()) std::this_thread::yield();
    }
    client.send(kForOthers);
  });
  EXPECT_NE(frame_of(poller_.turn(1h)), nullptr);
  other.join();
}

TEST_F(PollerTest, ATurnEndsWhenItsTimeIsOver) {
  Client& client = connect(1);
  for (int i = 0; i < 3; ++i) {
    client.send(read_of(kSmall));
    EXPECT_FALSE(poller_.turn(2ms));
    EXPECT_EQ(client.frames().size(), 1u);
    EXPECT_FALSE(is_called(0));
  }
}

TEST_F(PollerTest, TheTimeOfATurnThatHasEndedCallsNobody) {
  Client& client = connect(1);
  std::thread other([&] {
    client.send(read_of(kSmall));
    while (client.frames().empty()) std::this_thread::yield();
    client.send(kForOthers);
  });
  std::optional<Poller::Event> event;
  while (!event) event = poller_.turn(50ms);
  EXPECT_NE(frame_of(event), nullptr);
  other.join();
  EXPECT_FALSE(is_called(60));
  EXPECT_FALSE(poller_.turn(2ms));
}

TEST_F(PollerTest, WhatSomebodyWaitsForIsSentInTheTurnThatBringsIt) {
  Client& reader = connect(1);
  Client& writer = connect(2);
  reader.send(wire({.op = Op::kPULL, .slices = {{kEmpty, {}}}, .body = carry(0, 9.0)}));
  EXPECT_FALSE(poller_.turn(0s));
  EXPECT_TRUE(reader.frames().empty());
  writer.send(wire({.op = Op::kASSIGN, .slices = {{kEmpty, {1, 2}}}, .sequence = 1}));
  EXPECT_FALSE(poller_.turn(0s));
  const auto replies = reader.frames();
  ASSERT_EQ(replies.size(), 1u);
  EXPECT_EQ(floats_of(replies[0]->payload), (Floats{1, 2}));
}

TEST_F(PollerTest, ATurnEndsForRequestsThatFail) {
  Client& client = connect(1);
  client.send(wire({.op = Op::kPUSH, .slices = {{kSmall, {1, 2}}}}));
  EXPECT_FALSE(poller_.turn(1h));
  EXPECT_TRUE(service_.has_failures());
}

TEST_F(PollerTest, WhatIsBusyLingersWithoutSleeping) {
  const long before = num_sleeps();
  Poller busy(service_, bell_, 1h);
  EXPECT_FALSE(busy.turn(5ms));
  EXPECT_EQ(num_sleeps(), before);
  EXPECT_FALSE(poller_.turn(5ms));
  EXPECT_GT(num_sleeps(), before);
  eventfd_write(bell_, 1);
  EXPECT_FALSE(busy.turn(1h));
}

TEST_F(PollerTest, OnlyWhoStoppedInTheMiddleOfAFrameIsStalled) {
  Client& stopped = connect(1);
  Client& quiet = connect(2);
  stopped.send(std::span(kForOthers).first(10));
  quiet.send(read_of(kSmall));
  EXPECT_FALSE(poller_.turn(0s));
  EXPECT_EQ(poller_.stalled(0s), std::vector<Poller::Id>{1});
  EXPECT_TRUE(poller_.stalled(1h).empty());
}

}  // namespace
}  // namespace psstore::testing
