// A slot by itself: where values live, what a step does to them, who may still count.
#include "table/slot.h"

#include "shm/value_arena.h"
#include "table_support.h"

namespace psstore::testing {
namespace {

constexpr uint64_t kTensor = 7;
constexpr Key kKey = make_key(kTensor, 0);

class SlotTest : public OnDevices {
 protected:
  Slot make_slot(RuleKind rule, const Floats& values) {
    Slot slot({kKey, values.size(), DType::kFloat32, rule, 0}, 0);
    slot.initialise(slice_of(*backend, values), *backend);
    return slot;
  }
  Slot make_sgd_slot(const Floats& values) { return make_slot(RuleKind::kSgd, values); }

  void stage(Slot& slot, uint32_t rank, uint64_t round, const Floats& gradient) {
    slot.staging().offer({{rank, 1, round}, slice_of(*backend, gradient)});
  }

  PendingDecision pend(const Slot& slot, const Decision& decision) {
    PendingDecision pending(decision);
    if (!decision.skip() && slot.counted(decision)) pending.require_hyper(slot.spec());
    return pending;
  }
  Change settle(Slot& slot, const Decision& decision) {
    return slot.settle(pend(slot, decision), *backend);
  }

  Floats floats_of(const BufferRef& buffer) {
    const std::string bytes = backend->bytes_of(buffer, buffer->size());
    return elements_of(bytes.data(), bytes.size());
  }
  int64_t step_of(const Slot& slot) {
    int64_t step = -1;
    for (const auto& [name, bytes] : slot.dump(*backend)) {
      if (name == "step") std::memcpy(&step, bytes.data(), sizeof step);
    }
    return step;
  }
  std::optional<double> squares_of(Slot& slot, const Decision& decision) {
    const std::optional<Sum> sum = slot.squares(decision, *backend);
    if (!sum) return std::nullopt;
    const Gathered gathered = backend->gather_sums({*sum});
    return elements_of<double>(gathered.pieces, gathered.ready)[0];
  }

  std::shared_ptr<Backend> backend = make_backend(GetParam());
};

PSSTORE_ON_DEVICES(SlotTest);

// ---- where the value lives

TEST_P(SlotTest, HasNoValueUntilItIsInitialised) {
  const Slot slot({kKey, 2, DType::kFloat32, RuleKind::kSgd, 0}, 0);
  EXPECT_FALSE(slot.initialised());
  EXPECT_FALSE(slot.value());
}

TEST_P(SlotTest, UpdatesInPlaceWhenNobodyReads) {
  Slot slot = make_sgd_slot({5, 5});
  const Buffer* before = slot.value().get();
  stage(slot, 0, 1, {1, 2});
  EXPECT_EQ(settle(slot, decision(1, {member(0, 1)})), Change::kInPlace);
  EXPECT_EQ(slot.value().get(), before);
  EXPECT_EQ(floats_of(slot.value()), (Floats{4, 3}));
}

TEST_P(SlotTest, UpdatesOutOfPlaceWhileSomebodyReads) {
  Slot slot = make_sgd_slot({5, 5});
  const BufferRef reader = slot.value();
  stage(slot, 0, 1, {1, 2});
  EXPECT_EQ(settle(slot, decision(1, {member(0, 1)})), Change::kOutOfPlace);
  EXPECT_EQ(floats_of(reader), (Floats{5, 5}));
  EXPECT_EQ(floats_of(slot.value()), (Floats{4, 3}));
}

// What a client maps of shared memory (shm/value_view.h).
struct SharedSlot {
  HostBackend host{make_pool(), std::make_shared<ValueArena>(1 << 20)};
  Slot slot{{kKey, 1, DType::kFloat32, RuleKind::kAdd, 0}, 0};

  SharedSlot() { slot.initialise(slice_of(host, {0}), host); }
  Change add_one() { return slot.add(slice_of(host, {1}), host); }
};

TEST(SharedValues, ThatAreAlwaysReadTakeTurnsInTwoPlaces) {
  SharedSlot shared;
  BufferRef reader = shared.slot.value();
  const Buffer* const first = reader.get();
  EXPECT_EQ(shared.add_one(), Change::kOutOfPlace);
  const Buffer* const second = shared.slot.value().get();
  for (int i = 0; i < 3; ++i) {
    reader = shared.slot.value();
    EXPECT_EQ(shared.add_one(), Change::kOutOfPlace);
    EXPECT_EQ(shared.slot.value().get(), i % 2 == 0 ? first : second);
    EXPECT_EQ(floats_of(reader), (Floats{static_cast<float>(i + 1)}));
    EXPECT_EQ(floats_of(shared.slot.value()), (Floats{static_cast<float>(i + 2)}));
  }
}

TEST(SharedValues, LeaveThePlacesAloneThatAreReadStill) {
  SharedSlot shared;
  const BufferRef first = shared.slot.value();
  shared.add_one();
  const BufferRef second = shared.slot.value();
  EXPECT_EQ(shared.add_one(), Change::kOutOfPlace);
  EXPECT_EQ(floats_of(first), (Floats{0}));
  EXPECT_EQ(floats_of(second), (Floats{1}));
  EXPECT_EQ(floats_of(shared.slot.value()), (Floats{2}));
}

TEST(SharedValues, HaveOnePlaceAgainWhenNobodyReads) {
  SharedSlot shared;
  BufferRef reader = shared.slot.value();
  shared.add_one();
  EXPECT_FALSE(reader.unique());  // the slot's, for the next value
  EXPECT_EQ(shared.add_one(), Change::kInPlace);
  EXPECT_TRUE(reader.unique());
}

TEST(KeptPayloads, AreValuesWhereTheyLieIfLargePartsOfThem) {
  constexpr size_t kNumElems = kSharedValueBytes / sizeof(float);
  const auto pool = make_pool();
  HostBackend host(pool);
  const BufferRef payload = pool->allocate(kMaxSlicesPerKeptPayload * kSharedValueBytes);
  const auto value_in = [&](const BufferRef& buffer, size_t offset) {
    Slot slot({kKey, kNumElems, DType::kFloat32, RuleKind::kAssign, 0}, 0);
    slot.assign({buffer, offset, kSharedValueBytes, DType::kFloat32}, host);
    return slot.part(0).buffer->data();
  };
  EXPECT_EQ(value_in(payload, kSharedValueBytes), payload->data() + kSharedValueBytes);
  EXPECT_NE(value_in(payload, 4), payload->data() + 4);  // badly aligned
  const BufferRef larger = pool->allocate(payload->size() + 1);
  EXPECT_NE(value_in(larger, 0), larger->data());
  const BufferRef others = make_pool()->allocate(kSharedValueBytes);
  EXPECT_NE(value_in(others, 0), others->data());
}

TEST_P(SlotTest, AssignsAndAddsOutOfPlaceWhileSomebodyReads) {
  Slot slot = make_slot(RuleKind::kAssign, {1, 1});
  const BufferRef first = slot.value();
  EXPECT_EQ(slot.add(slice_of(*backend, {1, 2}), *backend), Change::kOutOfPlace);
  const BufferRef second = slot.value();
  EXPECT_EQ(slot.assign(slice_of(*backend, {9, 9}), *backend), Change::kOutOfPlace);
  EXPECT_EQ(floats_of(first), (Floats{1, 1}));
  EXPECT_EQ(floats_of(second), (Floats{2, 3}));
  EXPECT_EQ(floats_of(slot.value()), (Floats{9, 9}));
}

TEST_P(SlotTest, ConvertsHalfPrecisionWrites) {
  const std::vector<uint16_t> one_and_two{0x3F80, 0x4000};  // bfloat16
  Slot slot = make_slot(RuleKind::kAssign, {0, 0});
  const PayloadSlice halves{brought_to(*backend, one_and_two), 0, 4, DType::kBFloat16};
  slot.assign(halves, *backend);
  EXPECT_EQ(floats_of(slot.value()), (Floats{1, 2}));
  slot.add(halves, *backend);
  EXPECT_EQ(floats_of(slot.value()), (Floats{2, 4}));
}

TEST_P(SlotTest, AcceptsPayloadsOfAnyAlignment) {
  BufferRef payload = backend->allocate_payload(9);
  const Floats values{3, 4};
  std::memcpy(payload->data() + 1, values.data(), 8);
  Slot slot = make_sgd_slot({5, 5});
  slot.staging().offer({{0, 1, 1}, {backend->bring(payload), 1, 8, DType::kFloat32}});
  settle(slot, decision(1, {member(0, 1)}));
  EXPECT_EQ(floats_of(slot.value()), (Floats{2, 1}));
}

TEST_P(SlotTest, OfZeroElementsLivesLikeAnyOther) {
  Slot slot = make_sgd_slot({});
  slot.staging().offer({{0, 1, 1}, {}});
  settle(slot, decision(1, {member(0, 1)}));
  EXPECT_EQ(slot.version(), 1U);
  EXPECT_EQ(slot.value()->size(), 0U);
}

// ---- steps

TEST_P(SlotTest, ReducesInRankOrderWhateverTheOrderOfArrival) {
  // (1e8 + 1) - 1e8 is 0 in float32, 1e8 - 1e8 + 1 is 1: the order shows.
  const Floats by_rank{1e8F, 1, -1e8F};
  for (const std::vector<uint32_t>& arrival :
       {std::vector<uint32_t>{0, 1, 2}, {2, 1, 0}, {1, 2, 0}}) {
    Slot slot = make_sgd_slot({0});
    for (const uint32_t rank : arrival) stage(slot, rank, 1, {by_rank[rank]});
    settle(slot, decision(1, {member(0, 1), member(1, 1), member(2, 1)}));
    EXPECT_EQ(floats_of(slot.value()), (Floats{0}));
  }
}

TEST_P(SlotTest, WeighsMembersAndDividesTheirSum) {
  Slot slot = make_sgd_slot({0});
  stage(slot, 0, 1, {1});
  stage(slot, 1, 1, {5});
  Member heavy = member(1, 1);
  heavy.weight = 3.0F;
  settle(slot, Decision(1, false, 4.0, {member(0, 1), heavy}, {{0, sgd(1.0)}}));
  EXPECT_EQ(floats_of(slot.value()), (Floats{-4}));
}

TEST_P(SlotTest, CountsAMemberThatDoesNotNameItAsZeroWithTheDivisorUnchanged) {
  Slot slot = make_sgd_slot({0});
  stage(slot, 0, 1, {4});
  settle(slot, Decision(1, false, 2.0, {member(0, 1), member(1, 1, {kTensor})}, {{0, sgd(1.0)}}));
  EXPECT_EQ(floats_of(slot.value()), (Floats{-2}));
}

TEST_P(SlotTest, IsLeftAloneWhenNoMemberNamesIt) {
  Slot slot = make_sgd_slot({3});
  settle(slot, decision(1, {member(0, 1, {kTensor}), member(1, 1, {2, kTensor})}));
  EXPECT_EQ(floats_of(slot.value()), (Floats{3}));
  EXPECT_EQ(slot.version(), 0U);
  EXPECT_EQ(slot.state_bytes(), 0U);
  EXPECT_EQ(step_of(slot), 0);
}

TEST_P(SlotTest, IgnoresWhatAMemberPushedAndDidNotName) {
  Slot slot = make_sgd_slot({3});
  stage(slot, 0, 1, {1});
  settle(slot, decision(1, {member(0, 1, {kTensor})}));
  EXPECT_EQ(floats_of(slot.value()), (Floats{3}));
  EXPECT_EQ(slot.staging().num_bytes(), 0U);
}

TEST_P(SlotTest, ReleasesContributionsButDoesNothingElseOnASkip) {
  Slot slot = make_sgd_slot({3});
  stage(slot, 0, 1, {1});
  stage(slot, 1, 2, {1});  // of a round to come
  settle(slot, decision(1, {member(0, 1), member(1, 1)}, /*skip=*/true));
  EXPECT_EQ(floats_of(slot.value()), (Floats{3}));
  EXPECT_EQ(slot.version(), 0U);
  EXPECT_EQ(step_of(slot), 0);
  EXPECT_EQ(slot.staging().num_bytes(), sizeof(float));
}

TEST_P(SlotTest, KeepsStateFromTheFirstStepThatNeedsIt) {
  Slot slot = make_sgd_slot({0});
  stage(slot, 0, 1, {1});
  settle(slot, decision(1, {member(0, 1)}));
  EXPECT_EQ(slot.state_bytes(), 0U);
  for (uint64_t round = 2; round <= 3; ++round) {
    stage(slot, 0, round, {1});
    settle(slot, Decision(round, false, 1.0, {member(0, round)}, {{0, sgd(1.0, 0.5)}}));
  }
  // momentum 1, then 0.5 + 1
  EXPECT_EQ(floats_of(slot.value()), (Floats{-3.5F}));
  EXPECT_EQ(slot.state_bytes(), sizeof(float));
  EXPECT_EQ(slot.dump(*backend)[1].first, "momentum_buffer");
  EXPECT_EQ(step_of(slot), 3);
}

TEST_P(SlotTest, LacksContributionsOfAnotherRound) {
  Slot slot = make_sgd_slot({0});
  stage(slot, 0, 1, {1});
  stage(slot, 1, 1, {1});
  EXPECT_FALSE(slot.lacks(member(0, 1)));
  EXPECT_TRUE(slot.lacks(member(1, 2)));
  EXPECT_EQ(settle(slot, decision(1, {member(0, 1), member(1, 2)})), Change::kInPlace);
  EXPECT_EQ(floats_of(slot.value()), (Floats{-1}));
}

TEST_P(SlotTest, WithoutValueLacksWhateverIsStaged) {
  Slot slot({kKey, 1, DType::kFloat32, RuleKind::kSgd, 0}, 0);
  stage(slot, 0, 1, {1});
  EXPECT_FALSE(slot.lacks(member(0, 1, {kTensor})));
  EXPECT_FALSE(slot.counted(decision(1, {member(0, 1, {kTensor})})));
  EXPECT_TRUE(slot.lacks(member(0, 1)));
  EXPECT_EQ(settle(slot, decision(1, {member(0, 1)})), Change::kNone);
}

// ---- decisions that leave something open

TEST_P(SlotTest, IsReadyForAnEarlyDecisionOnceTheLastPromiseIsKept) {
  Slot slot = make_sgd_slot({0});
  const PendingDecision pending = pend(slot, early_decision(1, {member(0, 2), member(1, 1)}));
  EXPECT_FALSE(slot.ready(pending));
  stage(slot, 1, 1, {1});
  stage(slot, 0, 1, {1});  // of another round
  EXPECT_FALSE(slot.ready(pending));
  stage(slot, 0, 2, {1});
  EXPECT_TRUE(slot.ready(pending));
}

TEST_P(SlotTest, IsReadyForWhatDoesNotConcernIt) {
  const Slot slot = make_sgd_slot({0});
  const std::vector<Member> others{member(0, 1, {kTensor})};
  EXPECT_TRUE(slot.ready(pend(slot, early_decision(1, others))));
  EXPECT_TRUE(slot.ready(pend(slot, scaled_decision(1, others))));
}

TEST_P(SlotTest, MultipliesTheReducedGradientByTheScale) {
  Slot slot = make_sgd_slot({0});
  stage(slot, 0, 1, {3});
  PendingDecision pending = pend(slot, scaled_decision(1, {member(0, 1)}));
  EXPECT_FALSE(slot.ready(pending));
  pending.set_scale(0.5);
  EXPECT_TRUE(slot.ready(pending));
  slot.settle(pending, *backend);
  EXPECT_EQ(floats_of(slot.value()), (Floats{-1.5F}));
}

TEST_P(SlotTest, RemembersItsSquaresUntilTheNextDecision) {
  Slot slot = make_sgd_slot({0, 0});
  stage(slot, 0, 1, {3, 4});
  const Decision first = scaled_decision(1, {member(0, 1)});
  PendingDecision pending = pend(slot, first);
  EXPECT_EQ(squares_of(slot, first), 25.0);
  EXPECT_EQ(squares_of(slot, first), 25.0);
  pending.set_scale({});
  slot.settle(pending, *backend);
  EXPECT_EQ(squares_of(slot, first), 25.0);
  EXPECT_EQ(squares_of(slot, scaled_decision(2, {member(0, 2, {kTensor})})), std::nullopt);
  stage(slot, 0, 2, {1, 0});
  EXPECT_EQ(squares_of(slot, scaled_decision(2, {member(0, 2)})), 1.0);
}

TEST_P(SlotTest, HasNoSquaresOfADecisionWithoutScaleOrBeforeItsTime) {
  Slot slot = make_sgd_slot({0});
  stage(slot, 0, 1, {3});
  EXPECT_EQ(squares_of(slot, decision(1, {member(0, 1)})), std::nullopt);
  Slot later({kKey, 1, DType::kFloat32, RuleKind::kSgd, 0}, 1);
  EXPECT_EQ(squares_of(later, scaled_decision(1, {member(0, 1)})), std::nullopt);
}

// ---- restoring

TEST_P(SlotTest, UpdatesStateThatSomebodyReadsOutOfPlace) {
  Slot slot = make_sgd_slot({0});
  const auto step = [&](uint64_t round) {
    stage(slot, 0, round, {1});
    settle(slot, Decision(round, false, 1.0, {member(0, round)}, {{0, sgd(1.0, 0.5)}}));
  };
  step(1);
  const Buffer* const before = slot.part(1).buffer.get();
  step(2);
  EXPECT_EQ(slot.part(1).buffer.get(), before);
  const Part held = slot.part(1);
  step(3);
  EXPECT_EQ(floats_of(held.buffer), (Floats{1.5F}));
  EXPECT_EQ(held.version, 2U);
  EXPECT_EQ(floats_of(slot.part(1).buffer), (Floats{1.75F}));
}

TEST_P(SlotTest, RestoresInPlaceWhenNobodyReadsAndOutOfPlaceElse) {
  Slot slot = make_sgd_slot({1});
  EXPECT_EQ(slot.restore_value(slice_of(*backend, {2}), 0, *backend), Change::kInPlace);
  const BufferRef value = slot.value();
  EXPECT_EQ(slot.restore_value(slice_of(*backend, {3}), 0, *backend), Change::kOutOfPlace);
  EXPECT_EQ(floats_of(value), (Floats{2}));
  slot.restore_state(0, slice_of(*backend, {4}), 7, *backend);
  const Part state = slot.part(1);
  slot.restore_state(0, slice_of(*backend, {5}), 8, *backend);
  EXPECT_EQ(floats_of(state.buffer), (Floats{4}));
  EXPECT_EQ(floats_of(slot.part(1).buffer), (Floats{5}));
  EXPECT_EQ(step_of(slot), 8);
  EXPECT_EQ(slot.dump(*backend)[1].first, "momentum_buffer");
}

TEST_P(SlotTest, GivesEveryValueALargerVersionThanTheOneBefore) {
  Slot slot = make_sgd_slot({0});
  slot.restore_value(slice_of(*backend, {1}), 4, *backend);
  EXPECT_EQ(slot.version(), 5U);
  slot.restore_value(slice_of(*backend, {1}), 4, *backend);
  EXPECT_EQ(slot.version(), 6U);
  stage(slot, 0, 1, {1});
  settle(slot, decision(5, {member(0, 1)}));
  EXPECT_EQ(slot.version(), 7U);
  stage(slot, 0, 2, {1});
  settle(slot, decision(9, {member(0, 2)}));
  EXPECT_EQ(slot.version(), 9U);
}

// ---- staging

class StagingTest : public ::testing::Test {
 protected:
  Staged offer(const Origin& origin) { return staging.offer({origin, slice_of(*pool, {1})}); }

  std::shared_ptr<BufferPool> pool = make_pool();
  Staging staging;
};

TEST_F(StagingTest, ReplacesTheSameAndOlderRounds) {
  EXPECT_EQ(offer({3, 1, 5}), Staged::kTaken);
  EXPECT_EQ(offer({3, 1, 5}), Staged::kTaken);
  EXPECT_EQ(offer({3, 1, 6}), Staged::kTaken);
  EXPECT_EQ(staging.find({3, 1, 5}), nullptr);
  EXPECT_NE(staging.find({3, 1, 6}), nullptr);
  EXPECT_EQ(staging.num_bytes(), sizeof(float));
}

TEST_F(StagingTest, IgnoresALateResend) {
  offer({3, 1, 6});
  EXPECT_EQ(offer({3, 1, 5}), Staged::kLate);
  EXPECT_NE(staging.find({3, 1, 6}), nullptr);
}

TEST_F(StagingTest, PutsALaterLifeInPlaceOfAnEarlierOne) {
  offer({3, 1, 6});
  EXPECT_EQ(offer({3, 2, 1}), Staged::kTaken);
  EXPECT_EQ(offer({3, 1, 7}), Staged::kStale);
  EXPECT_NE(staging.find({3, 2, 1}), nullptr);
}

TEST_F(StagingTest, ReleasesWhatWasDecidedAndKeepsWhatIsToCome) {
  offer({0, 1, 4});
  offer({1, 1, 5});
  offer({2, 1, 4});
  staging.release(Decision(1, false, 2.0, {member(0, 4), member(1, 4)}, {}));
  EXPECT_EQ(staging.find({0, 1, 4}), nullptr);
  EXPECT_NE(staging.find({1, 1, 5}), nullptr);
  EXPECT_NE(staging.find({2, 1, 4}), nullptr);
}

TEST_F(StagingTest, FindsAndReleasesRanksWithGapsBetweenThem) {
  for (const uint32_t rank : {6U, 1U, 3U, 0U}) offer({rank, 1, 4});
  for (const uint32_t rank : {0U, 1U, 3U, 6U}) EXPECT_NE(staging.find({rank, 1, 4}), nullptr);
  for (const uint32_t rank : {2U, 4U, 7U}) EXPECT_EQ(staging.find({rank, 1, 4}), nullptr);

  staging.release(Decision(1, false, 2.0, {member(1, 4), member(2, 4), member(6, 4)}, {}));
  for (const uint32_t rank : {0U, 3U}) EXPECT_NE(staging.find({rank, 1, 4}), nullptr);
  for (const uint32_t rank : {1U, 6U}) EXPECT_EQ(staging.find({rank, 1, 4}), nullptr);
  EXPECT_EQ(staging.num_bytes(), 2 * sizeof(float));
}

TEST_F(StagingTest, ReturnsThePayloadOnceItsLastSliceIsReleased) {
  const BufferRef payload = buffer_of(*pool, Floats{1, 2});
  Staging other;
  staging.offer({{0, 1, 1}, {payload, 0, 4, DType::kFloat32}});
  other.offer({{0, 1, 1}, {payload, 4, 4, DType::kFloat32}});
  EXPECT_FALSE(payload.unique());
  const Decision decision(1, false, 1.0, {member(0, 1)}, {});
  staging.release(decision);
  EXPECT_FALSE(payload.unique());
  other.release(decision);
  EXPECT_TRUE(payload.unique());
}

}  // namespace
}  // namespace psstore::testing
