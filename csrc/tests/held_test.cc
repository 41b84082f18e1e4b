// A shard whose last decision leaves something open: who waits, for what, and what the others see.
#include "rows/contribution.h"
#include "shard/shard.h"
#include "shard_support.h"

namespace psstore::testing {
namespace {

constexpr Key kA = make_key(1, 0);
constexpr Key kB = make_key(2, 0);
constexpr Key kPlain = make_key(3, 0);

class HeldTest : public ShardTest {
 protected:
  HeldTest() {
    define(1, RuleKind::kSgd, 1);
    define(2, RuleKind::kSgd, 1);
    define(3, RuleKind::kAssign, 1);
  }

  ErrorCode status(Key key) { return look(key).status; }
  // Rank `rank` of round 1.
  SliceEntry push_to(Key key, uint32_t rank, float gradient) {
    return push({rank, 1, 1}, {{key, {gradient}}})[0];
  }
  std::vector<double> norms(const std::vector<Key>& keys) {
    asked = std::vector<SliceEntry>(keys.size());
    for (size_t i = 0; i < keys.size(); ++i) asked[i].key = keys[i];
    const Shard::Reply reply = shard.norms(asked);
    return elements_of<double>(reply.pieces, reply.ready);
  }

  std::vector<SliceEntry> asked;  // as norms() answered them
};

PSSTORE_ON_DEVICES(HeldTest);

// ---- contributions

TEST_P(HeldTest, TakesTheStepOfEachSliceInTheCallThatBringsItsLastContribution) {
  shard.advance(early_decision(1, {member(0, 1), member(1, 1)}));
  push_to(kA, 1, 1);
  push_to(kB, 1, 1);
  EXPECT_EQ(status(kA), ErrorCode::NOT_APPLIED);
  EXPECT_EQ(push_to(kA, 0, 2).version, 1U);
  EXPECT_EQ(shard.stats().at("applied_in_place"), 1U);
  EXPECT_EQ(value(kA), (Floats{-3}));
  EXPECT_EQ(status(kB), ErrorCode::NOT_APPLIED);
  EXPECT_EQ(status(kPlain), ErrorCode::OK);
}

TEST_P(HeldTest, TellsHowManySlicesWaitAndSettlesTheOthers) {
  push_to(kA, 0, 1);
  shard.advance(early_decision(1, {member(0, 1)}));
  EXPECT_EQ(shard.stats().at("held_slots"), 1U);
  EXPECT_FALSE(shard.settle(0));
  EXPECT_TRUE(shard.settle(1));
  EXPECT_EQ(shard.stats().at("applied_in_place"), 1U);
  push_to(kB, 0, 1);
  EXPECT_EQ(shard.stats().at("held_slots"), 0U);
  EXPECT_TRUE(shard.settle(0));
}

TEST_P(HeldTest, LetsNothingTakeThePlaceOfWhatASliceCountsOn) {
  shard.advance(early_decision(1, {member(0, 1), member(1, 1, {2})}));
  push_to(kA, 0, 1);
  push_to(kA, 0, 100);  // again
  EXPECT_EQ(push({0, 1, 2}, {{kA, {100}}})[0].status, ErrorCode::ROUND_OUT_OF_ORDER);
  EXPECT_EQ(push({1, 1, 2}, {{kB, {5}}})[0].status, ErrorCode::OK);  // it counts on rank 0 alone
  push_to(kA, 1, 2);
  push_to(kB, 0, 3);
  EXPECT_EQ(value(kA), (Floats{-3}));
  EXPECT_EQ(value(kB), (Floats{-3}));
  EXPECT_EQ(shard.stats().at("staged_bytes"), sizeof(float));  // rank 1, round 2
}

TEST_P(HeldTest, WaitsNoLongerThanUntilTheNextDecision) {
  shard.advance(early_decision(1, {member(0, 1), member(1, 1)}));
  push_to(kA, 0, 1);
  push_to(kB, 1, 2);
  shard.advance(decision(2, {}, /*skip=*/true));
  EXPECT_EQ(shard.version(), 2U);
  EXPECT_EQ(value(kA), (Floats{-1}));
  EXPECT_EQ(value(kB), (Floats{-2}));
  EXPECT_EQ(shard.missing().size(), 2U);
  EXPECT_EQ(shard.stats().at("held_slots"), 0U);
}

TEST_P(HeldTest, WaitsOnWhereTheNextDecisionFails) {
  shard.advance(early_decision(1, {member(0, 1), member(1, 1, {2})}));
  push_to(kA, 1, 1);
  push_to(kB, 0, 1);
  push({1, 1, 2}, {{kB, {4}}});
  const Decision without_hypers(2, false, 1.0, {member(1, 2, {1})}, {});
  error_of(ErrorCode::BAD_HYPER, [&] { shard.advance(without_hypers); });
  EXPECT_TRUE(shard.missing().empty());
  push_to(kA, 0, 2);
  EXPECT_EQ(value(kA), (Floats{-3}));
  EXPECT_EQ(value(kB), (Floats{-1}));
}

TEST_P(HeldTest, LetsGoOfADroppedTensor) {
  push_to(kA, 0, 1);
  shard.advance(early_decision(1, {member(0, 1)}));
  shard.drop(2);
  EXPECT_EQ(shard.stats().at("held_slots"), 0U);
  EXPECT_TRUE(shard.settle(0));
  shard.drop(1);
  EXPECT_TRUE(shard.settle(0));
  shard.advance(decision(2, {}, /*skip=*/true));
}

// ---- the scale

TEST_P(HeldTest, WaitsForTheScaleWithTheSlicesThatItConcerns) {
  push_to(kA, 0, 4);
  shard.advance(scaled_decision(1, {member(0, 1, {2})}));
  EXPECT_EQ(status(kA), ErrorCode::NOT_APPLIED);
  EXPECT_EQ(status(kB), ErrorCode::OK);
  EXPECT_TRUE(shard.settle(-1));
  error_of(ErrorCode::DECISION_GAP, [&] { shard.advance(decision(2, {}, /*skip=*/true)); });
  shard.set_scale(1, 0.25);
  EXPECT_FALSE(shard.settle(0));
  EXPECT_TRUE(shard.settle(1));
  EXPECT_EQ(value(kA), (Floats{-1}));
}

TEST_P(HeldTest, SumsSquaresOnceAndForTheLastDecisionOnly) {
  push_to(kA, 0, 3);
  EXPECT_TRUE(norms({kA}).empty());
  shard.advance(scaled_decision(1, {member(0, 1, {2})}));
  EXPECT_EQ(norms({kB, kA, kPlain}), (std::vector<double>{9}));
  EXPECT_EQ(statuses_of(asked), (std::vector<ErrorCode>{ErrorCode::NOT_MODIFIED, ErrorCode::OK,
                                                        ErrorCode::NOT_MODIFIED}));
  EXPECT_EQ(asked[1].num_bytes, sizeof(double));
  EXPECT_EQ(asked[1].dtype, DType::kFloat64);
  shard.set_scale(1, {});
  EXPECT_EQ(norms({kA, kA}), (std::vector<double>{9, 9}));
  EXPECT_EQ(value(kA), (Floats{0}));
  shard.advance(decision(2, {}, /*skip=*/true));
  EXPECT_TRUE(norms({kA}).empty());
}

// ---- restoring

TEST_P(HeldTest, DoesNotRestoreWhatWaits) {
  push_to(kA, 0, 1);
  shard.advance(scaled_decision(1, {member(0, 1, {2})}));
  EXPECT_EQ(restore(1, kA, {50}).status, ErrorCode::NOT_APPLIED);
  EXPECT_EQ(restore(2, kA, {50}, 1, 9).status, ErrorCode::NOT_APPLIED);
  EXPECT_EQ(restore(3, kB, {50}).status, ErrorCode::OK);
  shard.set_scale(1, 1.0);
  EXPECT_EQ(value(kA), (Floats{-1}));
  EXPECT_EQ(value(kB), (Floats{50}));
  EXPECT_EQ(look(kB).version, 2U);
}

TEST_P(HeldTest, RestoresOncePerSequence) {
  EXPECT_EQ(restore(1, kA, {5}).version, 1U);
  EXPECT_EQ(restore(2, kA, {7}, 1, 3).version, 3U);
  EXPECT_EQ(restore(2, kA, {8}, 1, 4).version, 3U);
  std::vector<SliceEntry> entries(2);
  entries[0].key = entries[1].key = kA;
  entries[1].part = 1;
  const Shard::Reply reply = read(entries);
  EXPECT_EQ(elements_of(reply.pieces, reply.ready), (Floats{5, 7}));
  EXPECT_EQ(entries[1].version, 3U);
}

// As much of it as others want.
void take_all_memory(Shard& shard) {
  for (uint64_t id = 100, num_elems = 1 << 20; num_elems > 0; ++id, num_elems /= 2) {
    try {
      shard.define(
          {id, DType::kFloat32, RuleKind::kAssign, 0, true, {{make_key(id, 0), num_elems}}});
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::OUT_OF_MEMORY);
    }
  }
}

// A decision that failed half-way would have taken steps that standbys are not told of.
TEST(FullShardTest, WaitsForRowsNoLongerThanUntilTheNextDecision) {
  const Key rows = make_key(1, 0);
  Shard shard({.max_memory_bytes = 4 << 20});
  TensorDefinition table;
  table.tensor_id = 1;
  table.rule = RuleKind::kSparseSgd;
  table.rows = {2, {}, {.admission = AdmissionKind::kAfter, .admit_after = 2}};
  table.slices = {{rows, 0}};
  shard.define(table);
  constexpr size_t kBytes = contributed_row_bytes(2);
  std::vector<SliceEntry> entries{{.key = rows, .num_bytes = kBytes, .dtype = kRowsEncoding}};
  const BufferRef payload = admit(shard, WriteKind::kPush, entries, kBytes);
  std::memset(payload->data(), 0, kBytes);
  shard.stage({0, 1, 1}, entries, payload);
  const GroupHypers hypers{{0, {{"lr", 1}, {"maximize", 0}}}};
  shard.advance(
      Decision(1, false, 1.0, {member(0, 1), member(1, 1)}, hypers, Open::kContributions));
  EXPECT_EQ(shard.stats().at("held_slots"), 1U);
  take_all_memory(shard);
  shard.advance(decision(2, {}));
  EXPECT_EQ(shard.stats().at("held_slots"), 0U);
  EXPECT_EQ(shard.state(rows).at(1).first, "counted");
}

TEST(FullShardTest, TakesNoStepOfATornRoundWithoutMemoryForTheLast) {
  constexpr size_t kElems = 40'000;
  Shard shard({.max_memory_bytes = 4 << 20});
  shard.define({1, DType::kFloat32, RuleKind::kSgd, 0, true, {{kA, 1}}});
  shard.define({2, DType::kFloat32, RuleKind::kSgd, 0, true, {{kB, kElems}}});
  struct Push {
    std::vector<SliceEntry> entries;
    BufferRef payload;
  };
  const auto pushed = [&](const Values& gradients) {
    Floats all;
    for (const auto& [_, one] : gradients) all.insert(all.end(), one.begin(), one.end());
    Push push{entries_for(gradients), {}};
    const size_t num_bytes = all.size() * sizeof(float);
    push.payload = admit(shard, WriteKind::kPush, push.entries, num_bytes);
    std::memcpy(push.payload->data(), all.data(), num_bytes);
    return push;
  };
  Push early = pushed({{kA, {1}}, {kB, Floats(kElems, 1)}});
  Push late = pushed({{kA, {2}}});
  shard.stage({0, 1, 1}, early.entries, early.payload);
  std::vector<SliceEntry> read(1);
  read[0].key = kB;
  std::optional<Shard::Reply> held_by_a_reader = shard.read(read, 64 << 20);
  shard.advance(early_decision(1, {member(0, 1), member(1, 1)}));
  take_all_memory(shard);
  error_of(ErrorCode::OUT_OF_MEMORY, [&] { shard.advance(decision(2, {})); });
  EXPECT_TRUE(shard.missing().empty());
  shard.stage({1, 1, 1}, late.entries, late.payload);
  held_by_a_reader.reset();
  shard.advance(decision(2, {}));
  const auto first = [&](Key key) {
    float value;
    std::memcpy(&value, shard.state(key).at(0).second.data(), sizeof value);
    return value;
  };
  EXPECT_EQ(first(kA), -3);
  EXPECT_EQ(first(kB), -1);
}

TEST(FullShardTest, DropsATensorThatCanNotTakeItsStep) {
  constexpr size_t kElems = 40'000;
  Shard shard({.max_memory_bytes = 4 << 20});
  shard.define({1, DType::kFloat32, RuleKind::kSgd, 0, true, {{kA, kElems}}});
  std::vector<SliceEntry> entries = entries_for({{kA, Floats(kElems, 1)}});
  const BufferRef payload = admit(shard, WriteKind::kPush, entries, kElems * sizeof(float));
  std::memset(payload->data(), 0, payload->size());
  shard.stage({0, 1, 1}, entries, payload);
  std::vector<SliceEntry> read(1);
  read[0].key = kA;
  const Shard::Reply held_by_a_reader = shard.read(read, 64 << 20);
  take_all_memory(shard);
  shard.advance(decision(1, {member(0, 1)}));
  error_of(ErrorCode::OUT_OF_MEMORY, [&] { shard.settle(-1); });
  shard.drop(1);
  EXPECT_TRUE(shard.is_settled());
  error_of(ErrorCode::UNKNOWN_KEY, [&] { shard.state(kA); });
}

}  // namespace
}  // namespace psstore::testing
