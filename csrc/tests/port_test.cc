// Desk and Port: what is answered at once, what comes out for others, and where replies wait.
#include "serve/port.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "request_support.h"

namespace psstore::testing {
namespace {

constexpr Key kSmall = make_key(1, 0);
constexpr Key kLarge = make_key(2, 0);
constexpr Key kWeights = make_key(3, 0);
constexpr Key kUnknown = make_key(4, 0);
constexpr Key kEmpty = make_key(5, 0);
constexpr size_t kLargeElems = 100'000;
const std::string kBody = "known";

struct Reply {
  std::shared_ptr<Frame> frame;
  Floats values;
};

class PortTest : public ::testing::Test {
 protected:
  PortTest() {
    shard_.define({1, DType::kFloat32, RuleKind::kAssign, 0, true, {{kSmall, 2}}});
    shard_.define({3, DType::kFloat32, RuleKind::kSgd, 0, true, {{kWeights, 2}}});
    shard_.define({2, DType::kFloat32, RuleKind::kAssign, 0, true, {{kLarge, kLargeElems}}});
    shard_.define({5, DType::kFloat32, RuleKind::kAssign, 0, false, {{kEmpty, 2}}});
  }

  // What comes out for others while bytes come in reads of at most `max_read`; they take no payloads.
  std::vector<std::shared_ptr<Frame>> others(std::span<const std::byte> bytes,
                                             size_t max_read = 1 << 20) {
    std::vector<std::shared_ptr<Frame>> all;
    receive(decoder_, bytes, max_read, [&] {
      while (std::shared_ptr<Frame> frame = port_.next_frame(now_s_)) {
        if (!frame->complete) decoder_.discard();
        all.push_back(std::move(frame));
      }
    });
    return all;
  }

  // The replies that wait, as a client reads them.
  std::vector<Reply> replies() { return read_all(port_.replies()); }
  static std::vector<Reply> read_all(Replies& replies) {
    Bytes stream;
    for (const Replies::Part& part : replies.take()) append(stream, bytes_of(part));
    std::vector<Reply> all;
    const auto pool = make_pool();
    FrameDecoder decoder;
    deliver(decoder, stream, stream.size(), [&](Frame& frame) {
      if (!frame.complete) {
        decoder.accept(pool->allocate(frame.header.payload_bytes));
        return;
      }
      all.push_back(
          {std::make_shared<Frame>(frame), frame.payload ? floats_of(frame.payload) : Floats()});
    });
    return all;
  }
  static std::span<const std::byte> bytes_of(const Replies::Part& part) {
    if (const auto* piece = std::get_if<Piece>(&part)) {
      return {piece->buffer->data(), piece->num_bytes};
    }
    return std::as_bytes(std::span(std::get<std::string>(part)));
  }

  Shard shard_{ShardOptions()};
  Desk desk_{shard_};
  double now_s_ = 100.0;
  FrameDecoder other_decoder_;
  FrameDecoder decoder_;
  Port port_{decoder_, desk_};
};

Floats ascending(size_t num_elems) {
  Floats values(num_elems);
  std::iota(values.begin(), values.end(), 0.0F);
  return values;
}

TEST_F(PortTest, OrdinaryRequestsAreAnsweredHoweverTheirBytesCome) {
  const Floats large = ascending(kLargeElems);
  const Bytes write = wire({Op::kASSIGN, {{kSmall, {1, 2}}, {kLarge, large}}, 7, 1});
  const Bytes read = wire({Op::kPULL, {{kLarge, {}}, {kSmall, {}}}, 8});
  port_.open({.client = "a"});
  for (const size_t max_read : {size_t{1} << 20, size_t{17}}) {
    EXPECT_TRUE(others(write, max_read).empty());
    EXPECT_TRUE(others(read, max_read).empty());
    const std::vector<Reply> all = replies();
    ASSERT_EQ(all.size(), 2u);
    EXPECT_EQ(all[0].frame->header.op, Op::kASSIGNED);
    EXPECT_EQ(all[0].frame->header.request, 7u);
    for (const SliceEntry& entry : all[0].frame->table) EXPECT_EQ(entry.status, ErrorCode::OK);
    EXPECT_EQ(all[1].frame->header.op, Op::kPULLED);
    EXPECT_EQ(all[1].frame->header.request, 8u);
    Floats expected = large;
    expected.insert(expected.end(), {1, 2});
    EXPECT_EQ(all[1].values, expected);
  }
}

TEST_F(PortTest, ALargeValueWaitsAsItIsAndOutlivesTheNextOne) {
  port_.open({.client = "a"});
  EXPECT_TRUE(others(wire({Op::kPULL, {{kLarge, {}}}})).empty());
  const Replies::Parts parts = port_.replies().take();
  EXPECT_TRUE(port_.replies().empty());
  ASSERT_EQ(parts.size(), 2u);
  ASSERT_TRUE(std::holds_alternative<Piece>(parts[1]));
  EXPECT_TRUE(others(wire({Op::kASSIGN, {{kLarge, ascending(kLargeElems)}}, 1, 1})).empty());
  EXPECT_TRUE(
      std::ranges::all_of(bytes_of(parts[1]), [](std::byte b) { return b == std::byte{0}; }));
}

TEST_F(PortTest, EverythingIsForOthersUntilItIsOpen) {
  const Bytes read = wire({Op::kPULL, {{kSmall, {}}}});
  EXPECT_EQ(others(read).size(), 1u);
  port_.open({.client = "a"});
  EXPECT_TRUE(others(read).empty());
  desk_.close();
  EXPECT_EQ(others(read).size(), 1u);
  EXPECT_EQ(replies().size(), 1u);
}

TEST_F(PortTest, AnAnnouncedFrameForOthersIsTheirsToTheEnd) {
  port_.open({.client = "a"});
  port_.attach({0, 1});
  decoder_.feed(wire({Op::kPUSH, {{kWeights, {1, 2}}}, 1, 0, 1, kBody}));
  const std::shared_ptr<Frame> announced = port_.next_frame(now_s_);
  ASSERT_NE(announced, nullptr);
  EXPECT_FALSE(announced->complete);
  desk_.remember(kBody, 0.0);
  decoder_.discard();
  EXPECT_EQ(port_.next_frame(now_s_), announced);
  EXPECT_TRUE(announced->complete);
  EXPECT_TRUE(port_.replies().empty());
}

TEST_F(PortTest, AReadThatFailsIsForOthersAndAWriteSaysSo) {
  port_.open({.client = "a"});
  EXPECT_EQ(others(wire({Op::kPULL, {{kSmall, {}}, {kUnknown, {}}}})).size(), 1u);
  EXPECT_TRUE(port_.replies().empty());
  EXPECT_TRUE(others(wire({Op::kASSIGN, {{kUnknown, {1}}}, 1, 1})).empty());
  EXPECT_EQ(replies().at(0).frame->table[0].status, ErrorCode::UNKNOWN_KEY);
}

TEST_F(PortTest, APushIsOrdinaryOfTheNewestLifeAttachedHere) {
  const auto push = [](uint32_t incarnation, const std::string& body) {
    return wire({Op::kPUSH, {{kWeights, {1, 2}}}, 1, 0, incarnation, body});
  };
  port_.open({.client = "a"});
  desk_.remember(kBody, 0.0);
  EXPECT_EQ(others(push(2, kBody)).size(), 2u);  // announced, complete
  port_.attach({0, 2});
  EXPECT_TRUE(others(push(2, kBody)).empty());
  const Reply pushed = replies().at(0);
  EXPECT_EQ(pushed.frame->header.op, Op::kPUSHED);
  EXPECT_EQ(pushed.frame->table[0].status, ErrorCode::OK);
  EXPECT_EQ(others(push(2, "news")).size(), 2u);
  EXPECT_EQ(others(push(1, kBody)).size(), 2u);
  desk_.attached({0, 3});
  EXPECT_EQ(others(push(2, kBody)).size(), 2u);
  EXPECT_TRUE(port_.replies().empty());
}

TEST_F(PortTest, BodiesThatWereNotSaidForLongAreForgottenWhenThereAreTooMany) {
  port_.open({.client = "a"});
  const Bytes read = wire({.op = Op::kPULL, .slices = {{kSmall, {}}}, .body = kBody});
  const auto remember_others = [&](size_t count) {
    for (size_t i = 0; i < count; ++i) desk_.remember(std::to_string(i), 0.0);
  };
  desk_.remember(std::string(kMaxRememberedBodyBytes + 1, 'x'), 0.0);
  desk_.remember(kBody, 0.0);
  for (int times = 0; times < 2; ++times) {
    remember_others(kMaxRememberedBodies - 1);
    EXPECT_TRUE(others(read).empty());
  }
  remember_others(kMaxRememberedBodies);
  EXPECT_EQ(others(read).size(), 1u);
}

TEST_F(PortTest, ABodyThatIsRememberedAgainTakesNoOthersPlace) {
  port_.open({.client = "a"});
  desk_.remember(kBody, 0.0);
  for (size_t i = 0; i <= kMaxRememberedBodies; ++i) desk_.remember("again", 0.0);
  EXPECT_TRUE(others(wire({.op = Op::kPULL, .slices = {{kSmall, {}}}, .body = kBody})).empty());
}

TEST_F(PortTest, AReadWaitsForAWriteHereOrElsewhereAndIsAnsweredWithIt) {
  Port reader{other_decoder_, desk_};
  reader.open({.connection = 2, .client = "b"});
  port_.open({.connection = 1, .client = "a"});
  desk_.remember(kBody, 9.0);
  const Bytes read = wire({.op = Op::kPULL, .slices = {{kEmpty, {}}}, .request = 8, .body = kBody});
  other_decoder_.feed(read);
  EXPECT_EQ(reader.next_frame(now_s_), nullptr);
  EXPECT_TRUE(others(read).empty());
  EXPECT_TRUE(replies().empty());
  EXPECT_EQ(desk_.next_wake(), now_s_ + 9.0);

  EXPECT_TRUE(others(wire({Op::kASSIGN, {{kEmpty, {3, 4}}}, 7, 1})).empty());
  const std::vector<Reply> ours = replies();
  ASSERT_EQ(ours.size(), 2u);
  EXPECT_EQ(ours[0].frame->header.op, Op::kASSIGNED);
  EXPECT_EQ(ours[1].values, (Floats{3, 4}));
  EXPECT_EQ(desk_.next_wake(), 0.0);
  auto deliveries = desk_.take_deliveries();
  ASSERT_EQ(deliveries.size(), 1u);
  EXPECT_EQ(read_all(deliveries[2]).at(0).values, (Floats{3, 4}));
  EXPECT_EQ(desk_.next_wake(), std::nullopt);
}

TEST_F(PortTest, AReadIsLookedAtAgainWhenOthersHaveDoneSomethingToWhatItWaitsFor) {
  port_.open({.connection = 1, .client = "a"});
  desk_.remember(kBody, 9.0);
  EXPECT_TRUE(others(wire({.op = Op::kPULL, .slices = {{kEmpty, {}}}, .body = kBody})).empty());
  for (const Key key : {kSmall, kEmpty}) {
    desk_.touched(entries_for({{key, {}}}));
    EXPECT_EQ(desk_.next_wake(), key == kEmpty ? 0.0 : now_s_ + 9.0);
  }
  desk_.wake(now_s_);  // it is not there yet
  EXPECT_TRUE(desk_.take_deliveries().empty());
  EXPECT_EQ(desk_.next_wake(), now_s_ + 9.0);
}

TEST_F(PortTest, AReadWhoseTimeIsOverIsLeftToOthers) {
  port_.open({.connection = 1, .client = "a"});
  desk_.remember(kBody, 9.0);
  const Bytes read = wire({.op = Op::kPULL, .slices = {{kEmpty, {}}}, .request = 8, .body = kBody});
  EXPECT_TRUE(others(read).empty());
  desk_.wake(now_s_ + 8.0);
  EXPECT_FALSE(desk_.has_left_over());
  desk_.wake(now_s_ + 9.0);
  ASSERT_TRUE(desk_.has_left_over());
  EXPECT_EQ(desk_.take_left_over().at(0).frame->header.request, 8u);
  EXPECT_TRUE(others(read).empty());
  desk_.forget(1);
  desk_.wake(now_s_ + 99.0);
  EXPECT_FALSE(desk_.has_left_over());
}

TEST_F(PortTest, TooManyReadsThatWaitAreForOthers) {
  port_.open({.connection = 1, .client = "a"});
  desk_.remember(kBody, 9.0);
  const Bytes read = wire({.op = Op::kPULL, .slices = {{kEmpty, {}}}, .body = kBody});
  for (size_t i = 0; i < kMaxParked; ++i) EXPECT_TRUE(others(read).empty());
  EXPECT_EQ(others(read).size(), 1u);
}

TEST_F(PortTest, RepliesHaveToBeTakenBeforeItGoesOn) {
  port_.open({.client = "a"});
  const Bytes read = wire({Op::kPULL, {{kLarge, {}}}});
  Bytes stream;
  for (int i = 0; i < 3; ++i) append(stream, read);
  decoder_.feed(stream);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(port_.next_frame(now_s_), nullptr);
    EXPECT_EQ(replies().size(), 1u);
  }
  EXPECT_EQ(port_.next_frame(now_s_), nullptr);
  EXPECT_TRUE(port_.replies().empty());
  EXPECT_FALSE(decoder_.mid_frame());
}

TEST_F(PortTest, PayloadsAreChecksummedForWhoWantsIt) {
  port_.open({.client = "a", .wants_checksum = true});
  EXPECT_TRUE(others(wire({Op::kASSIGN, {{kSmall, {1, 2}}}, 1, 1})).empty());
  EXPECT_TRUE(others(wire({Op::kPULL, {{kSmall, {}}}})).empty());
  const Reply reply = replies().at(1);
  EXPECT_TRUE(reply.frame->header.has_checksum());
  EXPECT_EQ(reply.values, (Floats{1, 2}));
}

TEST_F(PortTest, KnowsWhetherAnythingWasAskedSinceItIsOpen) {
  others(TestFrame{.op = Op::kHELLO}.wire());
  EXPECT_FALSE(port_.has_asked());
  port_.open({.client = "a"});
  EXPECT_FALSE(port_.has_asked());
  others(TestFrame{.op = Op::kSTATS}.wire());
  EXPECT_TRUE(port_.has_asked());
}

}  // namespace
}  // namespace psstore::testing
