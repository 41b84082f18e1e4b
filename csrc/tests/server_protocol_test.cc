// DataService and ServerProtocol: what is answered, what comes out for others, and where replies wait.
#include "server/server_protocol.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
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
Decision skip(uint64_t number) {
  return Decision(number, true, 1.0, {}, {});
}

struct Reply {
  std::shared_ptr<Frame> frame;
  Floats values;
};

class ServerProtocolTest : public ::testing::Test {
 protected:
  ServerProtocolTest() {
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
      while (std::shared_ptr<Frame> frame = protocol_.next_frame(now_s_)) {
        if (!frame->complete) decoder_.discard();
        all.push_back(std::move(frame));
      }
    });
    return all;
  }

  // The replies that wait, as a client reads them.
  std::vector<Reply> replies() { return read_all(protocol_.replies()); }
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
      const bool has_floats = frame.payload && !is_of_changes(frame.table[0].dtype);
      all.push_back(
          {std::make_shared<Frame>(frame), has_floats ? floats_of(frame.payload) : Floats()});
    });
    return all;
  }
  static std::span<const std::byte> bytes_of(const Replies::Part& part) {
    if (const auto* piece = std::get_if<Piece>(&part)) {
      return {piece->buffer->data(), piece->num_bytes};
    }
    return std::as_bytes(std::span(std::get<std::string>(part)));
  }

  static ErrorCode code_of(const DataService::Failure& failure) {
    try {
      std::rethrow_exception(failure.error);
    } catch (const Error& error) {
      return error.code();
    }
  }

  Shard shard_{ShardOptions()};
  DataService service_{shard_};
  double now_s_ = 100.0;
  FrameDecoder other_decoder_;
  FrameDecoder decoder_;
  ServerProtocol protocol_{decoder_, service_, 1};
};

Floats ascending(size_t num_elems) {
  Floats values(num_elems);
  std::iota(values.begin(), values.end(), 0.0F);
  return values;
}

// A PULL of what has changed of one slice, which its reader has a version of.
Bytes pull_of_changes(Key key, uint64_t wanted_version) {
  std::vector<SliceEntry> table(1);
  table[0].key = key;
  table[0].version = wanted_version;
  table[0].dtype = changes_of(DType::kFloat32);
  const FrameParts parts{.op = Op::kPULL, .request = 1, .table = table};
  Bytes bytes(parts.encoded_bytes());
  encode_frame(parts, bytes.data());
  return bytes;
}

TEST_F(ServerProtocolTest, WhatChangesAreMadeOfIsKeptAMinuteBeyondTheLastWhoAskedForThem) {
  protocol_.open("a", false);
  const auto kept = [&] { return shard_.stats().at("published_bytes"); };
  const auto asks_at = [&](double now_s, uint64_t wanted_version) {
    now_s_ = now_s;
    EXPECT_TRUE(others(pull_of_changes(kSmall, wanted_version)).empty());
    return replies().at(0).frame->table[0].dtype;
  };
  const auto writes = [&](uint64_t sequence, Floats values) {
    EXPECT_TRUE(others(wire({Op::kASSIGN, {{kSmall, std::move(values)}}, 7, sequence})).empty());
    replies();
  };
  writes(1, {1, 2});
  EXPECT_EQ(kept(), 0u) << "nobody has asked";
  EXPECT_EQ(asks_at(100, 0), DType::kFloat32) << "the whole";
  writes(2, {1, 3});
  service_.wake(100 + 10 * kHoldS);
  EXPECT_EQ(asks_at(100 + 10 * kHoldS, 2), changes_of(DType::kFloat32))
      << "connected all that time";
  service_.forget(1);
  const double left_s = 100 + 10 * kHoldS;
  service_.wake(left_s + kHoldS - 1);
  EXPECT_GT(kept(), 0u) << "who has lost a connection may come again";
  EXPECT_TRUE(service_.next_wake().has_value());
  service_.wake(left_s + kHoldS);
  EXPECT_EQ(kept(), 0u);
  EXPECT_FALSE(service_.next_wake().has_value());
}

TEST_F(ServerProtocolTest, OrdinaryRequestsAreAnsweredHoweverTheirBytesCome) {
  const Floats large = ascending(kLargeElems);
  const Bytes write = wire({Op::kASSIGN, {{kSmall, {1, 2}}, {kLarge, large}}, 7, 1});
  const Bytes read = wire({Op::kPULL, {{kLarge, {}}, {kSmall, {}}}, 8});
  protocol_.open("a", false);
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

TEST_F(ServerProtocolTest, ALargeValueWaitsAsItIsAndOutlivesTheNextOne) {
  protocol_.open("a", false);
  EXPECT_TRUE(others(wire({Op::kPULL, {{kLarge, {}}}})).empty());
  const Replies::Parts parts = protocol_.replies().take();
  EXPECT_TRUE(protocol_.replies().empty());
  ASSERT_EQ(parts.size(), 2u);
  ASSERT_TRUE(std::holds_alternative<Piece>(parts[1]));
  EXPECT_TRUE(others(wire({Op::kASSIGN, {{kLarge, ascending(kLargeElems)}}, 1, 1})).empty());
  EXPECT_TRUE(
      std::ranges::all_of(bytes_of(parts[1]), [](std::byte b) { return b == std::byte{0}; }));
}

TEST_F(ServerProtocolTest, EverythingIsForOthersUntilItIsOpen) {
  const Bytes read = wire({Op::kPULL, {{kSmall, {}}}});
  EXPECT_EQ(others(read).size(), 1u);
  protocol_.open("a", false);
  EXPECT_TRUE(others(read).empty());
  service_.close();
  EXPECT_EQ(others(read).size(), 1u);
  EXPECT_EQ(replies().size(), 1u);
}

TEST_F(ServerProtocolTest, NewsComeOutAndTheirRequestIsTakenBack) {
  protocol_.open("a", false);
  protocol_.attach({0, 1});
  for (const uint64_t number : {1u, 2u}) {
    decoder_.feed(wire({Op::kPUSH, {{kWeights, {1, 2}}}, 1, 0, 1, carry(number)}));
    const std::shared_ptr<Frame> announced = protocol_.next_frame(now_s_);
    ASSERT_NE(announced, nullptr);
    EXPECT_FALSE(announced->complete);
    shard_.advance(skip(number));
    service_.advanced(false);
    protocol_.again(announced);
    EXPECT_EQ(protocol_.next_frame(now_s_), nullptr);
    EXPECT_TRUE(announced->complete);
    EXPECT_EQ(replies().at(0).frame->header.op, Op::kPUSHED);
  }
}

TEST_F(ServerProtocolTest, AnAnnouncedFrameThatOthersKeepIsTheirsToTheEnd) {
  protocol_.open("a", false);
  protocol_.attach({0, 1});
  decoder_.feed(wire({Op::kPUSH, {{kWeights, {1, 2}}}, 1, 0, 1, carry(1)}));
  const std::shared_ptr<Frame> announced = protocol_.next_frame(now_s_);
  ASSERT_NE(announced, nullptr);
  shard_.advance(skip(1));
  decoder_.discard();
  EXPECT_EQ(protocol_.next_frame(now_s_), announced);
  EXPECT_TRUE(announced->complete);
  EXPECT_TRUE(protocol_.replies().empty());
}

TEST_F(ServerProtocolTest, EachSliceSaysWhatFailedThere) {
  protocol_.open("a", false);
  EXPECT_TRUE(others(wire({Op::kPULL, {{kSmall, {}}, {kUnknown, {}}}})).empty());
  EXPECT_EQ(replies().at(0).frame->table[1].status, ErrorCode::UNKNOWN_KEY);
  EXPECT_TRUE(others(wire({Op::kASSIGN, {{kUnknown, {1}}}, 1, 1})).empty());
  EXPECT_EQ(replies().at(0).frame->table[0].status, ErrorCode::UNKNOWN_KEY);
}

// Those behind it may be on their way: they would be out of turn.
TEST_F(ServerProtocolTest, AWriteThatIsRefusedAsAWholeUsesItsNumber) {
  constexpr size_t kElems = 1 << 19;
  using enum ErrorCode;
  for (const bool has_room_for_payload : {true, false}) {
    Shard shard({.max_memory_bytes = (has_room_for_payload ? 5u : 3u) << 20});
    shard.define({1, DType::kFloat32, RuleKind::kAdd, 0, true, {{kSmall, 2}}});
    shard.define({2, DType::kFloat32, RuleKind::kAdd, 0, true, {{kLarge, kElems}}});
    DataService service(shard);
    FrameDecoder decoder;
    ServerProtocol protocol(decoder, service, 1);
    protocol.open("a", false);
    const auto add = [&](uint64_t number, const Values& slices) {
      return wire({.op = Op::kADD, .slices = slices, .request = number, .sequence = number});
    };
    const auto take = [&](const Bytes& bytes) {
      receive(decoder, bytes, bytes.size(), [&] { EXPECT_EQ(protocol.next_frame(0), nullptr); });
    };
    const auto statuses = [&] {
      std::vector<ErrorCode> found;
      for (const Reply& reply : read_all(protocol.replies())) {
        found.push_back(reply.frame->table[0].status);
      }
      return found;
    };
    take(add(1, {{kLarge, Floats(kElems, 1)}}));
    EXPECT_EQ(service.take_failures().size(), has_room_for_payload ? 0U : 1U);
    protocol.replies().clear();
    std::vector<SliceEntry> read(1);
    read[0].key = kLarge;
    const Shard::Reply held = shard.read(read, 64 << 20);  // another value needs other memory
    Bytes stream = add(2, {{kSmall, {1, 2}}});
    append(stream, add(3, {{kLarge, Floats(kElems, 1)}}));
    append(stream, add(4, {{kSmall, {1, 2}}}));
    take(stream);
    EXPECT_EQ(service.take_failures().size(), 1U);
    EXPECT_EQ(statuses(), (std::vector{OK, OK}));
    take(stream);  // its answers were lost
    EXPECT_FALSE(service.has_failures());
    EXPECT_EQ(statuses(), (std::vector{OK, OUT_OF_MEMORY, OK}));
    take(wire({Op::kPULL, {{kSmall, {}}}}));
    EXPECT_EQ(read_all(protocol.replies()).at(0).values, (Floats{2, 4}));
  }
}

TEST(RefusedWriteTest, IsRefusedForItsReasonWhateverStatusItsClientSent) {
  constexpr uint32_t kBytes = 4u << 20;
  Shard shard({.max_memory_bytes = 6u << 20});
  shard.define({1, DType::kFloat32, RuleKind::kAdd, 0, true, {{kSmall, kBytes / sizeof(float)}}});
  DataService service(shard);
  FrameDecoder decoder;
  ServerProtocol protocol(decoder, service, 1);
  protocol.open("a", false);
  const SliceEntry entry{.key = kSmall, .num_bytes = kBytes, .status = ErrorCode{200}};
  const FrameParts parts{
      .op = Op::kADD, .request = 1, .sequence = 1, .table = {&entry, 1}, .payload_bytes = kBytes};
  Bytes write(parts.encoded_bytes());
  encode_frame(parts, write.data());
  write.resize(write.size() + kBytes);
  receive(decoder, write, write.size(), [&] { EXPECT_EQ(protocol.next_frame(0), nullptr); });
  EXPECT_TRUE(service.has_failures());
  const auto refused = shard.refusals();
  ASSERT_EQ(refused.size(), 1u);
  EXPECT_EQ(refused[0].second.runs, (std::vector<RefusedRun>{{1, 0, 1, ErrorCode::OUT_OF_MEMORY}}));
}

TEST_F(ServerProtocolTest, AWriteThatAReaderMayNotMakeIsNotRemembered) {
  protocol_.open("reader", false);
  protocol_.allow(std::array{static_cast<uint8_t>(Op::kPULL)});
  EXPECT_TRUE(others(wire({Op::kASSIGN, {{kSmall, {1, 2}}}, 1, 1})).empty());
  EXPECT_EQ(code_of(service_.take_failures().at(0)), ErrorCode::NOT_ALLOWED);
  EXPECT_EQ(shard_.last_sequence("reader"), 0U);
}

TEST_F(ServerProtocolTest, APushIsOfTheNewestLifeAttachedHere) {
  const auto code_of_push = [&](uint32_t incarnation) {
    EXPECT_TRUE(others(wire({Op::kPUSH, {{kWeights, {1, 2}}}, 1, 0, incarnation})).empty());
    const auto failures = service_.take_failures();
    if (failures.empty()) return replies().at(0).frame->table[0].status;
    EXPECT_EQ(failures.size(), 1u);
    return code_of(failures[0]);
  };
  protocol_.open("a", false);
  EXPECT_EQ(code_of_push(2), ErrorCode::NOT_A_WORKER);
  protocol_.attach({0, 2});
  EXPECT_EQ(code_of_push(2), ErrorCode::OK);
  EXPECT_EQ(code_of_push(1), ErrorCode::NOT_A_WORKER);
  service_.attached({0, 3});
  EXPECT_EQ(code_of_push(2), ErrorCode::STALE_INCARNATION);
  EXPECT_TRUE(protocol_.replies().empty());
}

TEST_F(ServerProtocolTest, AReadWaitsForAWriteHereOrElsewhereAndIsAnsweredWithIt) {
  ServerProtocol reader{other_decoder_, service_, 2};
  reader.open("b", false);
  protocol_.open("a", false);
  const Bytes read =
      wire({.op = Op::kPULL, .slices = {{kEmpty, {}}}, .request = 8, .body = carry(0, 9.0)});
  other_decoder_.feed(read);
  EXPECT_EQ(reader.next_frame(now_s_), nullptr);
  EXPECT_TRUE(others(read).empty());
  EXPECT_TRUE(replies().empty());
  EXPECT_EQ(service_.next_wake(), now_s_ + 9.0);

  EXPECT_TRUE(others(wire({Op::kASSIGN, {{kEmpty, {3, 4}}}, 7, 1})).empty());
  const std::vector<Reply> ours = replies();
  ASSERT_EQ(ours.size(), 2u);
  EXPECT_EQ(ours[0].frame->header.op, Op::kASSIGNED);
  EXPECT_EQ(ours[1].values, (Floats{3, 4}));
  EXPECT_EQ(service_.next_wake(), 0.0);
  auto deliveries = service_.take_deliveries();
  ASSERT_EQ(deliveries.size(), 1u);
  EXPECT_EQ(read_all(deliveries[2]).at(0).values, (Floats{3, 4}));
  EXPECT_EQ(service_.next_wake(), std::nullopt);
}

TEST_F(ServerProtocolTest, AReadIsLookedAtAgainWhenSomethingWasDoneToWhatItWaitsFor) {
  protocol_.open("a", false);
  const std::string waits = carry(0, 9.0);
  EXPECT_TRUE(others(wire({.op = Op::kPULL, .slices = {{kEmpty, {}}}, .body = waits})).empty());
  EXPECT_TRUE(others(wire({Op::kASSIGN, {{kSmall, {1, 2}}}, 1, 1})).empty());
  EXPECT_EQ(service_.next_wake(), now_s_ + 9.0);
  service_.schema_changed();
  EXPECT_EQ(service_.next_wake(), 0.0);
  service_.wake(now_s_);  // it is not there yet
  EXPECT_TRUE(service_.take_deliveries().empty());
  EXPECT_EQ(service_.next_wake(), now_s_ + 9.0);
}

TEST_F(ServerProtocolTest, AReadWhoseTimeIsOverSaysWhatIsMissing) {
  protocol_.open("a", false);
  const std::string waits = carry(0, 9.0);
  const Bytes read = wire({.op = Op::kPULL, .slices = {{kEmpty, {}}}, .request = 8, .body = waits});
  EXPECT_TRUE(others(read).empty());
  service_.wake(now_s_ + 8.0);
  EXPECT_TRUE(service_.take_deliveries().empty());
  service_.wake(now_s_ + 9.0);
  auto deliveries = service_.take_deliveries();
  ASSERT_EQ(deliveries.size(), 1u);
  EXPECT_EQ(read_all(deliveries[1]).at(0).frame->table[0].status, ErrorCode::NOT_INITIALISED);
  EXPECT_TRUE(others(read).empty());
  service_.forget(1);
  service_.wake(now_s_ + 99.0);
  EXPECT_TRUE(service_.take_deliveries().empty());
}

TEST_F(ServerProtocolTest, TooManyReadsThatWaitAreRefused) {
  protocol_.open("a", false);
  const std::string waits = carry(0, 9.0);
  const Bytes read = wire({.op = Op::kPULL, .slices = {{kEmpty, {}}}, .body = waits});
  for (size_t i = 0; i < kMaxPendingReads; ++i) EXPECT_TRUE(others(read).empty());
  EXPECT_FALSE(service_.has_failures());
  EXPECT_TRUE(others(read).empty());
  EXPECT_EQ(code_of(service_.take_failures().at(0)), ErrorCode::OVERLOADED);
}

TEST_F(ServerProtocolTest, RepliesHaveToBeTakenBeforeItGoesOn) {
  protocol_.open("a", false);
  const Bytes read = wire({Op::kPULL, {{kLarge, {}}}});
  Bytes stream;
  for (int i = 0; i < 3; ++i) append(stream, read);
  decoder_.feed(stream);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(protocol_.next_frame(now_s_), nullptr);
    EXPECT_EQ(replies().size(), 1u);
  }
  EXPECT_EQ(protocol_.next_frame(now_s_), nullptr);
  EXPECT_TRUE(protocol_.replies().empty());
  EXPECT_FALSE(decoder_.mid_frame());
}

TEST_F(ServerProtocolTest, PayloadsAreChecksummedForWhoWantsIt) {
  protocol_.open("a", true);
  EXPECT_TRUE(others(wire({Op::kASSIGN, {{kSmall, {1, 2}}}, 1, 1})).empty());
  EXPECT_TRUE(others(wire({Op::kPULL, {{kSmall, {}}}})).empty());
  const Reply reply = replies().at(1);
  EXPECT_TRUE(reply.frame->header.has_checksum());
  EXPECT_EQ(reply.values, (Floats{1, 2}));
}

TEST_F(ServerProtocolTest, KnowsWhetherAnythingWasAskedSinceItIsOpen) {
  others(TestFrame{.op = Op::kHELLO}.wire());
  EXPECT_FALSE(protocol_.has_asked());
  protocol_.open("a", false);
  EXPECT_FALSE(protocol_.has_asked());
  others(TestFrame{.op = Op::kSTATS}.wire());
  EXPECT_TRUE(protocol_.has_asked());
}

}  // namespace
}  // namespace psstore::testing
