// Replication: when replies go that wait for standbys, and that a standby is heard however much it is owed.
#include "server/replication.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "request_support.h"
#include "server/server_protocol.h"
#include "shm/push_arena.h"
#include "shm/seen_memory.h"
#include "shm/value_arena.h"

namespace psstore::testing {
namespace {

constexpr uint64_t kStandby = 1;

class ReplicationTest : public ::testing::Test {
 protected:
  ReplicationTest() { replication_.follow(kStandby, standby_, /*wants_checksum=*/false); }

  // A change whose values are of so many bytes.
  void record(size_t num_bytes) {
    replication_.record({.op = Op::kPUSH}, {pool_->allocate(num_bytes), num_bytes});
  }
  void fill(size_t num_bytes) {
    replication_.record_to(kStandby, {.op = Op::kFILL},
                           {Piece{pool_->allocate(num_bytes), num_bytes}});
  }
  // Whether a reply that is made now may go at once.
  bool replies_go() {
    Replies replies;
    replies.set_gate(&replication_, kStandby + 1);
    replies.add("a reply");
    return replies.num_free_bytes() > 0;
  }

  std::shared_ptr<BufferPool> pool_ = make_pool();
  Replies standby_;
  Replication replication_;
};

TEST_F(ReplicationTest, RepliesWaitForWhatAStandbyThatCountsHasNotGot) {
  replication_.count(kStandby);
  EXPECT_TRUE(replies_go());
  record(1);
  EXPECT_FALSE(replies_go());
  replication_.acknowledged(kStandby, 1);
  EXPECT_TRUE(replies_go());
}

TEST_F(ReplicationTest, NobodyWaitsForAStandbyThatIsFilledUntilItIsFarBehind) {
  fill(1);
  record(kMinBehindBytes / 2);
  EXPECT_TRUE(replies_go());
  record(kMinBehindBytes / 2);
  EXPECT_FALSE(replies_go());
  replication_.count(kStandby);
  EXPECT_FALSE(replies_go());
  replication_.acknowledged(kStandby, 2);
  EXPECT_TRUE(replies_go());
}

TEST_F(ReplicationTest, AsMuchMayWaitForAStandbyAsItIsFilledWith) {
  for (int i = 0; i < 2; ++i) fill(kMinBehindBytes);
  record(kMinBehindBytes);
  record(kMinBehindBytes / 2);
  EXPECT_TRUE(replies_go());
  record(kMinBehindBytes);
  EXPECT_FALSE(replies_go());
}

TEST_F(ReplicationTest, WhoWaitsForAStandbyThatIsFarBehindGoesOnOnceItIsGone) {
  record(kMinBehindBytes);
  EXPECT_FALSE(replies_go()) << "its head is more, and it is filled with nothing";
  replication_.disconnected(kStandby);
  EXPECT_TRUE(replies_go());
  EXPECT_EQ(replication_.take_ready().count(kStandby + 1), 1);
}

// ---- the lease

double suspended = 0;

TEST(LeaseTest, GoesOnWhileTheMachineIsSuspended) {
  suspended = 0;
  Replies standby;
  Replication replication([] { return suspended; });
  replication.follow(kStandby, standby, /*wants_checksum=*/false);
  replication.set_lease(3);
  replication.is_now(100);
  replication.count(kStandby);
  replication.record({.op = Op::kPUSH});
  replication.is_beat();
  replication.acknowledged(kStandby, 1);
  replication.is_now(102);
  EXPECT_TRUE(replication.is_open());
  suspended = 60;
  replication.is_now(102);
  EXPECT_FALSE(replication.is_open());
}

// ---- lent memory

// Of what a client pushes through memory that it shares with the shard.
class LendingTest : public ReplicationTest {
 protected:
  static constexpr uint64_t kClient = 7;
  static constexpr uint64_t kAddress = uint64_t{1} << 36;

  void sees() { replication_.sees(kStandby, kClient, kAddress); }
  // Record n, which is what the client pushes into block n.
  void push(uint64_t number) {
    std::vector<SliceEntry> entries{{.key = 1, .num_bytes = kPushBlockBytes}};
    const BufferRef payload =
        memory_->range_of(laid_out(entries, number * kPushBlockBytes), number);
    replication_.record({.op = Op::kPUSH, .table = entries}, {payload, kPushBlockBytes},
                        Lying{kClient, number * kPushBlockBytes});
  }
  // Records whose ranges nobody needs any more.
  std::vector<uint64_t> released() { return memory_->take_released(); }

  const std::shared_ptr<PushArena> arena_ = PushArena::create(8 * kPushBlockBytes);
  const std::shared_ptr<SeenMemory> memory_ = SeenMemory::map(arena_->file().get(), 0);
};

using Numbers = std::vector<uint64_t>;

TEST_F(LendingTest, AStandbyThatSeesItIsToldWhereItLies) {
  sees();
  push(1);
  const std::string sent = std::get<std::string>(standby_.take().front());
  const Header header = parse_header(std::as_bytes(std::span(sent)));
  EXPECT_TRUE(header.is_shared());
  EXPECT_EQ(header.payload_bytes, kPushBlockBytes);
  EXPECT_EQ(header.request, 1);
  SliceEntry entry;
  std::memcpy(&entry, sent.data() + kHeaderBytes, sizeof entry);
  EXPECT_EQ(entry.offset, kAddress + kPushBlockBytes);
}

TEST_F(LendingTest, AnotherOneIsSentIt) {
  push(1);
  EXPECT_GT(standby_.num_bytes(), kPushBlockBytes);
  EXPECT_EQ(released(), Numbers{});
  standby_.clear();
  EXPECT_EQ(released(), Numbers{1});
}

TEST_F(LendingTest, ItIsLentUntilTheStandbyLetsGoOfIt) {
  sees();
  replication_.count(kStandby);
  for (const uint64_t number : {1u, 2u}) push(number);
  replication_.acknowledged(kStandby, 2);
  EXPECT_EQ(released(), Numbers{});
  replication_.let_go(kStandby, 2);
  EXPECT_EQ(released(), Numbers{2});
  replication_.let_go(kStandby, 1);
  EXPECT_EQ(released(), Numbers{1});
}

TEST_F(LendingTest, WhatAStandbyMayLeadWithStaysAsItIsAlthoughItsConnectionIsLost) {
  sees();
  replication_.count(kStandby);
  push(1);
  replication_.disconnected(kStandby);
  EXPECT_EQ(released(), Numbers{});
  push(2);
  EXPECT_EQ(released(), Numbers{2}) << "nobody is sent it";
  replication_.forget(kStandby);
  EXPECT_EQ(released(), Numbers{1});
}

TEST_F(LendingTest, AStandbyThatWillNotLeadNeedsNothingOnceItsConnectionIsLost) {
  sees();
  push(1);
  replication_.disconnected(kStandby);
  EXPECT_EQ(released(), Numbers{1});
}

TEST_F(LendingTest, NothingIsLentOfAClientThatIsGone) {
  sees();
  push(1);
  replication_.client_gone(kClient);
  push(2);
  EXPECT_GT(standby_.num_bytes(), kPushBlockBytes);
  EXPECT_EQ(released(), Numbers{}) << "it may not know";
  replication_.let_go(kStandby, 1);
  EXPECT_EQ(released(), Numbers{1});
}

// A standby's connection, at its shard.
class StandbysConnectionTest : public ::testing::Test {
 protected:
  StandbysConnectionTest() {
    protocol.open("standby", /*wants_checksum=*/false);
    protocol.follow();
  }

  Shard shard{ShardOptions()};
  DataService service{shard};
  FrameDecoder decoder;
  ServerProtocol protocol{decoder, service, kStandby};
};

TEST_F(StandbysConnectionTest, IsHeardHoweverMuchTheStandbyIsOwed) {
  Replication& replication = service.replication();
  const BufferRef values = make_pool()->allocate(kMaxWaitingReplyBytes);
  replication.record({.op = Op::kPUSH}, {values, kMaxWaitingReplyBytes});
  ASSERT_TRUE(protocol.replies().is_full());
  const Bytes answer = wire({.op = Op::kPUSHED, .slices = {}, .request = 1});
  receive(decoder, answer, answer.size(),
          [&] { EXPECT_EQ(protocol.next_frame(0.0), nullptr) << "it is for nobody else"; });
  EXPECT_EQ(replication.followers().at(kStandby).has, 1);
}

TEST_F(StandbysConnectionTest, LeavesAWordThatHasAPayloadForOthersToRefuse) {
  const Bytes word = wire({.op = Op::kPUSHED, .slices = {{make_key(1, 0), {1, 2}}}});
  decoder.feed(word);
  const std::shared_ptr<Frame> frame = protocol.next_frame(0.0);
  ASSERT_NE(frame, nullptr);
  EXPECT_FALSE(frame->complete);
}

// What a worker has pushed to one slice before it died waits there until a decision is made, and its next life has pushed
// to another one.
TEST(ReplicationOverAConnectionTest, AStandbyIsFilledWithWhatWaitsOfOlderLives) {
  const Key first = make_key(1, 0), second = make_key(1, 1);
  Shard shard{ShardOptions()}, other{ShardOptions()};
  const TensorDefinition both{1,    DType::kFloat32,          RuleKind::kSgd, 0,
                              true, {{first, 2}, {second, 2}}};
  shard.define(both);
  DataService service(shard);
  FrameDecoder from_client;
  ServerProtocol client(from_client, service, kStandby + 1);
  client.open("client", /*wants_checksum=*/false);
  const auto push = [&](uint32_t incarnation, const Values& slices) {
    client.attach({0, incarnation});
    from_client.feed(wire({.op = Op::kPUSH, .slices = slices, .incarnation = incarnation}));
    EXPECT_EQ(client.next_frame(0.0), nullptr);
  };
  push(1, {{first, {1, 2}}, {second, {3, 4}}});
  push(2, {{first, {5, 6}}});

  FrameDecoder from_standby, from_shard;
  ServerProtocol standby(from_standby, service, kStandby);
  standby.open("standby", /*wants_checksum=*/false);
  standby.follow();
  ASSERT_TRUE(service.fill(kStandby));
  DataService copy(other);
  ServerProtocol leader(from_shard, copy, kStandby);
  leader.lead();
  other.resume(shard.history(), std::nullopt);
  other.define(both);
  for (const Replies::Part& part : standby.replies().take()) {
    from_shard.feed(std::as_bytes(std::span(std::get<std::string>(part))));
    EXPECT_EQ(leader.next_frame(0.0), nullptr);
  }
  EXPECT_EQ(other.stats().at("staged_bytes"), shard.stats().at("staged_bytes"));
}

TEST(ReplicationOverAConnectionTest, WhatComesOverAStreamAStandbySeesWhereTheShardKeepsIt) {
  constexpr uint64_t kAddress = uint64_t{1} << 63;
  const Key key = make_key(1, 0);
  const auto arena = std::make_shared<ValueArena>(16u << 20);
  Shard shard({.arena = arena});
  shard.define({1, DType::kFloat32, RuleKind::kAssign, 0, true, {{key, 200'000}}});
  DataService service(shard);
  FrameDecoder from_standby, from_client;
  ServerProtocol standby(from_standby, service, kStandby);
  standby.open("standby", /*wants_checksum=*/false);
  standby.follow();
  service.replication().sees(kStandby, kOwnMemory, kAddress);
  ServerProtocol client(from_client, service, kStandby + 1);
  client.open("client", /*wants_checksum=*/false);
  const Bytes write = wire(
      {.op = Op::kASSIGN, .slices = {{key, Floats(200'000, 3.0f)}}, .request = 1, .sequence = 1});
  receive(from_client, write, write.size(), [&] { (void)client.next_frame(0.0); });
  const std::string sent = std::get<std::string>(standby.replies().take().front());
  EXPECT_TRUE(parse_header(std::as_bytes(std::span(sent))).is_shared());
  SliceEntry entry;
  std::memcpy(&entry, sent.data() + kHeaderBytes, sizeof entry);

  const auto seen = SeenMemory::map(arena->readonly_file().get(), kAddress);
  const BufferRef payload = seen->range_of({&entry, 1}, 1);
  const Floats values(200'000, 3.0f);
  EXPECT_EQ(payload->size(), values.size() * sizeof(float));
  EXPECT_EQ(std::memcmp(payload->data(), values.data(), payload->size()), 0);

  const Bytes add =
      wire({.op = Op::kADD, .slices = {{key, Floats(200'000, 1.0f)}}, .request = 2, .sequence = 2});
  receive(from_client, add, add.size(), [&] { (void)client.next_frame(0.0); });
  EXPECT_EQ(std::memcmp(payload->data(), values.data(), payload->size()), 0)
      << "the slot has kept the payload as its value, and changes another one";
}

TEST(ReplicationOverAConnectionTest, AStandbyIsSentThatAWriteWasRefusedAsAWhole) {
  const Key key = make_key(1, 0);
  Shard shard({.max_memory_bytes = 6 << 20}), other(ShardOptions{});
  for (Shard* const one : {&shard, &other}) {
    one->define({1, DType::kFloat32, RuleKind::kAssign, 0, false, {{key, 1 << 20}}});
  }
  DataService service(shard);
  FrameDecoder from_standby, from_client;
  ServerProtocol standby(from_standby, service, kStandby);
  standby.open("standby", /*wants_checksum=*/false);
  standby.follow();
  ServerProtocol client(from_client, service, kStandby + 1);
  client.open("client", /*wants_checksum=*/false);
  const Bytes write = wire(
      {.op = Op::kASSIGN, .slices = {{key, Floats(1 << 20, 3.0f)}}, .request = 1, .sequence = 1});
  receive(from_client, write, write.size(), [&] { (void)client.next_frame(0.0); });
  EXPECT_TRUE(service.has_failures());
  const std::string sent = std::get<std::string>(standby.replies().take().front());
  FrameDecoder decoder;
  decoder.feed(std::as_bytes(std::span(sent)));
  const std::shared_ptr<Frame> record = decoder.next_frame();
  ASSERT_NE(record, nullptr);
  repeat(other, *record, "client");
  EXPECT_EQ(other.last_sequence("client"), 1U);
  EXPECT_EQ(other.stats().at("writes"), 0U);
}

}  // namespace
}  // namespace psstore::testing
