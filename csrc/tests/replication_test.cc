// Replication: when replies go that wait for standbys, and that a standby is heard however much it is owed.
#include "server/replication.h"

#include <gtest/gtest.h>

#include "request_support.h"
#include "server/server_protocol.h"

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

TEST(ReplicationOverAConnectionTest, AStandbyIsHeardHoweverMuchItIsOwed) {
  Shard shard{ShardOptions()};
  DataService service(shard);
  FrameDecoder decoder;
  ServerProtocol protocol(decoder, service, kStandby);
  protocol.open("standby", /*wants_checksum=*/false);
  protocol.follow();
  Replication& replication = service.replication();
  const BufferRef values = make_pool()->allocate(kMaxWaitingReplyBytes);
  replication.record({.op = Op::kPUSH}, {values, kMaxWaitingReplyBytes});
  ASSERT_TRUE(protocol.replies().is_full());
  const Bytes answer = wire({.op = Op::kPUSHED, .slices = {}, .request = 1});
  receive(decoder, answer, answer.size(),
          [&] { EXPECT_EQ(protocol.next_frame(0.0), nullptr) << "it is for nobody else"; });
  EXPECT_EQ(replication.followers().at(kStandby).has, 1);
}

}  // namespace
}  // namespace psstore::testing
