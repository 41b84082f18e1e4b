// LocalLink: what is heard, what is held for others, and what is answered.
#include "local/local_link.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "request_support.h"

namespace psstore::testing {
namespace {

constexpr Key kPair = make_key(1, 0);
constexpr Key kMany = make_key(2, 0);
constexpr size_t kManyElems = 100'000;

class LocalLinkTest : public ::testing::Test {
 protected:
  LocalLinkTest() {
    shard_.define({1, DType::kFloat32, RuleKind::kAssign, 0, true, {{kPair, 2}}});
    shard_.define({2, DType::kFloat32, RuleKind::kAssign, 0, true, {{kMany, kManyElems}}});
    protocol_.open("a", false);
  }

  void say(const Bytes& frame) { said_.add(std::vector<std::byte>(frame.begin(), frame.end())); }
  bool is_heard() {
    link_.hear(said_);
    return said_.done();
  }
  // All that there is to receive, in windows of so many bytes.
  std::vector<std::shared_ptr<Frame>> answers(size_t window = 1 << 20) {
    Bytes stream;
    Bytes some(window);
    while (const size_t num_bytes = link_.answer(some)) {
      append(stream, std::span(some).first(num_bytes));
    }
    std::vector<std::shared_ptr<Frame>> all;
    const auto pool = make_pool();
    FrameDecoder decoder;
    deliver(decoder, stream, stream.size() + 1, [&](Frame& frame) {
      if (frame.complete) {
        all.push_back(std::make_shared<Frame>(frame));
      } else {
        decoder.accept(pool->allocate(frame.header.payload_bytes));
      }
    });
    return all;
  }

  Shard shard_{ShardOptions()};
  DataService service_{shard_};
  FrameDecoder decoder_;
  ServerProtocol protocol_{decoder_, service_, 1};
  LocalLink link_{decoder_, protocol_, service_, nullptr};
  Outgoing said_;
};

Floats ones(size_t num_elems) {
  return Floats(num_elems, 1.0F);
}

TEST_F(LocalLinkTest, WhatIsSaidForDataIsHeardAndAnsweredAtOnce) {
  say(wire({Op::kASSIGN, {{kMany, ones(kManyElems)}}, 7, 1}));
  say(wire({Op::kPULL, {{kMany, {}}}, 8, 0, 0, carry(0)}));
  EXPECT_TRUE(is_heard());
  EXPECT_EQ(link_.take_event(), nullptr);
  EXPECT_TRUE(link_.has_answers());
  const auto came = answers(1000);
  ASSERT_EQ(came.size(), 2u);
  EXPECT_EQ(came[0]->header.request, 7u);
  EXPECT_EQ(came[1]->header.request, 8u);
  EXPECT_EQ(floats_of(came[1]->payload), ones(kManyElems));
  EXPECT_FALSE(link_.has_answers());
  EXPECT_FALSE(link_.wants_turn());
}

TEST_F(LocalLinkTest, WhatComesBehindAFrameForOthersWaitsForThem) {
  say(wire({Op::kSTATS, {}, 7}));
  say(wire({Op::kASSIGN, {{kPair, {1, 2}}}, 8, 1}));
  EXPECT_TRUE(is_heard()) << "in one window";
  EXPECT_TRUE(link_.wants_turn());
  EXPECT_FALSE(link_.has_answers());
  const std::shared_ptr<Frame> event = link_.take_event();
  ASSERT_NE(event, nullptr);
  EXPECT_EQ(event->header.request, 7u);
  const Bytes reply = wire({Op::kSTATS, {}, 7});
  link_.reply({std::string(reinterpret_cast<const char*>(reply.data()), reply.size())});
  EXPECT_TRUE(is_heard());
  const auto came = answers();
  ASSERT_EQ(came.size(), 2u) << "in the order in which they were answered";
  EXPECT_EQ(came[0]->header.request, 7u);
  EXPECT_EQ(came[1]->header.request, 8u);
}

TEST_F(LocalLinkTest, WhoeverDrivesItIsToldWhatTheClientDidWrong) {
  say(Bytes(kHeaderBytes));
  say(wire({Op::kASSIGN, {{kPair, {1, 2}}}, 8, 1}));
  is_heard();
  EXPECT_TRUE(link_.wants_turn());
  EXPECT_THROW(link_.take_event(), Error);
  EXPECT_TRUE(answers().empty());
}

}  // namespace
}  // namespace psstore::testing
