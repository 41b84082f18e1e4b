// A shard as the server drives it: admission, exactly-once, decisions, reads.
#include "shard/shard.h"

#include <cstring>
#include <limits>
#include <variant>

#include "shard_support.h"

namespace psstore::testing {
namespace {

constexpr Key kA = make_key(1, 0);
constexpr Key kB = make_key(2, 0);
constexpr Key kUnknown = make_key(99, 0);
constexpr Origin kFirst{0, 1, 1};  // rank 0, incarnation 1, round 1
using Statuses = std::vector<ErrorCode>;

PSSTORE_ON_DEVICES(ShardTest);

// ---- schema

TEST_P(ShardTest, DefinesTheSameTensorTwiceWithoutEffect) {
  define(1, RuleKind::kAssign, 1);
  write(WriteKind::kAssign, 1, {{kA, {5}}});
  define(1, RuleKind::kAssign, 1);
  EXPECT_EQ(value(kA), (Floats{5}));
  error_of(ErrorCode::INTERNAL, [&] { define(1, RuleKind::kAssign, 2); });
  EXPECT_EQ(value(kA), (Floats{5}));
}

TEST_P(ShardTest, ForgetsADroppedTensorAndIgnoresItsLateDefinition) {
  define(1, RuleKind::kSgd, 1);
  shard.drop(1);
  define(1, RuleKind::kSgd, 1);
  EXPECT_EQ(look(kA).status, ErrorCode::UNKNOWN_KEY);
  EXPECT_EQ(shard.stats().at("slots"), 0U);
  shard.advance(decision(1, {member(0, 1)}));  // counts on nothing of it
}

TEST_P(ShardTest, TakesAVersionOnlyBeforeItsFirstTensor) {
  shard.set_version(41);
  define(1, RuleKind::kSgd, 1);
  error_of(ErrorCode::BAD_ARGUMENT, [&] { shard.set_version(50); });
  push(kFirst, {{kA, {1}}});
  shard.advance(decision(42, {member(0, 1)}));
  EXPECT_EQ(shard.version(), 42U);
  EXPECT_EQ(value(kA), (Floats{-1}));
}

TEST_P(ShardTest, NeedsAStripe) {
  error_of(ErrorCode::BAD_ARGUMENT, [] { const Shard none(ShardOptions{0, 0, false}); });
}

// ---- admission

TEST_P(ShardTest, AdmitsSliceBySliceAndServesTheGoodOnes) {
  define(1, RuleKind::kSgd, 2);
  define(2, RuleKind::kAssign, 1);
  const auto entries = push(kFirst, {{kUnknown, {1}}, {kB, {1}}, {kA, {3, 4}}, {kA, {1}}});
  EXPECT_EQ(statuses_of(entries), (Statuses{ErrorCode::UNKNOWN_KEY, ErrorCode::RULE_MISMATCH,
                                            ErrorCode::OK, ErrorCode::SIZE_MISMATCH}));
  shard.advance(decision(1, {member(0, 1)}));
  EXPECT_EQ(value(kA), (Floats{-3, -4}));
}

TEST_P(ShardTest, AllocatesNothingWhenNothingIsAdmitted) {
  auto entries = entries_for({{kUnknown, {1, 2}}});
  EXPECT_FALSE(admit(shard, WriteKind::kPush, entries, 8));
  EXPECT_EQ(shard.stats().at("pool_bytes"), 0U);
}

TEST_P(ShardTest, RefusesSizesThatDoNotAddUp) {
  auto entries = entries_for({{kA, {1, 2}}});
  error_of(ErrorCode::BAD_HEADER, [&] { admit(shard, WriteKind::kPush, entries, 9); });
}

TEST_P(ShardTest, RefusesAPayloadOfAnotherSizeThanWasAdmitted) {
  define(1, RuleKind::kSgd, 2);
  const auto pool = make_pool();
  auto entries = entries_for({{kA, {1, 2}}});
  error_of(ErrorCode::BAD_ARGUMENT, [&] { shard.stage(kFirst, entries, BufferRef()); });
  error_of(ErrorCode::BAD_ARGUMENT, [&] { shard.stage(kFirst, entries, pool->allocate(4)); });
}

TEST_P(ShardTest, SaysUnknownIfTheTensorWasDroppedWhileThePayloadCame) {
  define(1, RuleKind::kSgd, 1);
  std::vector<SliceEntry> entries;
  const BufferRef payload = receive(WriteKind::kPush, {{kA, {1}}}, entries);
  ASSERT_TRUE(payload);
  shard.drop(1);
  shard.stage(kFirst, entries, payload);
  EXPECT_EQ(entries[0].status, ErrorCode::UNKNOWN_KEY);
}

TEST_P(ShardTest, RefusesNonFiniteValuesIfToldTo) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  ShardOptions refusing = options();
  refusing.refuse_non_finite = true;
  Shard strict(refusing);
  strict.define({1, DType::kFloat32, RuleKind::kAssign, 0, true, {{kA, 2}}});
  const auto pool = make_pool();
  auto entries = entries_for({{kA, {1, nan}}, {kA, {infinity, 1}}, {kA, {1, 2}}});
  const BufferRef payload = buffer_of(*pool, Floats{1, nan, infinity, 1, 1, 2});
  strict.write(WriteKind::kAssign, "client", 1, entries, payload);
  EXPECT_EQ(statuses_of(entries),
            (Statuses{ErrorCode::NON_FINITE, ErrorCode::NON_FINITE, ErrorCode::OK}));
  EXPECT_EQ(entries[2].version, 1U);
}

// ---- contributions

TEST_P(ShardTest, ReplacesAContributionThatIsPushedAgainBeforeItsDecision) {
  define(1, RuleKind::kSgd, 1);
  push(kFirst, {{kA, {1}}});
  push(kFirst, {{kA, {2}}});
  shard.advance(decision(1, {member(0, 1)}));
  EXPECT_EQ(value(kA), (Floats{-2}));
}

TEST_P(ShardTest, IgnoresAContributionThatIsPushedAgainAfterItsDecision) {
  define(1, RuleKind::kSgd, 1);
  push(kFirst, {{kA, {1}}});
  shard.advance(decision(1, {member(0, 1)}));
  const auto entries = push(kFirst, {{kA, {100}}});
  EXPECT_EQ(entries[0].status, ErrorCode::OK);
  EXPECT_EQ(shard.stats().at("duplicates"), 1U);
  EXPECT_EQ(shard.stats().at("staged_bytes"), sizeof(float));  // still lazily pending, of round 1
  EXPECT_EQ(value(kA), (Floats{-1}));
  EXPECT_EQ(shard.stats().at("staged_bytes"), 0U);
}

TEST_P(ShardTest, MeasuresWhatWasStagedOfTensorsAndKeepsIt) {
  define(1, RuleKind::kSgd, 2);
  define(2, RuleKind::kSgd, 1);
  define(3, RuleKind::kSgd, 1);
  push(kFirst, {{kA, {3, 4}}, {make_key(3, 0), {12}}});
  push({1, 1, 1}, {{kA, {100, 100}}});
  push(kFirst, {{kA, {1, 2}}});  // in place of the first
  shard.seal(kFirst);
  EXPECT_EQ(shard.staged_squares(kFirst, {{1, 1}, {3, 3}}), 1.0 + 4 + 144);
  EXPECT_EQ(shard.staged_squares(kFirst, {{1, 1}}), 5.0);
  EXPECT_EQ(shard.staged_squares(kFirst, {{7, 9}}), 0.0);
  EXPECT_EQ(shard.staged_squares(kFirst, {{1, 2}}), std::nullopt);
  EXPECT_EQ(push(kFirst, {{kA, {8, 8}}})[0].status, ErrorCode::OK);  // and ignored
  push(kFirst, {{kB, {2}}});                                         // which was not there
  EXPECT_EQ(shard.staged_squares(kFirst, {{1, 2}}), 9.0);
  shard.advance(decision(1, {member(0, 1)}));
  EXPECT_EQ(value(kA), (Floats{-1, -2}));
  push({0, 1, 2}, {{kA, {1, 1}}});
  push({0, 1, 2}, {{kA, {5, 5}}});
  EXPECT_EQ(shard.staged_squares({0, 1, 2}, {{1, 1}}), 50.0);
}

TEST_P(ShardTest, SealsNothingOfALaterLifeOfARank) {
  define(1, RuleKind::kSgd, 1);
  push({0, 2, 1}, {{kA, {1}}});
  shard.seal(kFirst);
  push({0, 2, 1}, {{kA, {2}}});
  EXPECT_EQ(shard.staged_squares({0, 2, 1}, {{1, 1}}), 4.0);
}

TEST_P(ShardTest, RefusesAnEarlierLifeOfARank) {
  define(1, RuleKind::kSgd, 1);
  push({0, 2, 1}, {{kA, {1}}});
  EXPECT_EQ(push({0, 1, 1}, {{kA, {1}}})[0].status, ErrorCode::STALE_INCARNATION);
  push({1, 1, 1}, {{kA, {1}}});
  Member second_life = member(0, 1);
  second_life.origin.incarnation = 2;
  shard.advance(decision(1, {second_life, member(1, 1)}));
  EXPECT_EQ(value(kA), (Floats{-2}));
}

TEST_P(ShardTest, CarriesThePendingDecisionOutBeforeItStagesTheNextRound) {
  define(1, RuleKind::kSgd, 1);
  push(kFirst, {{kA, {1}}});
  shard.advance(decision(1, {member(0, 1)}));
  EXPECT_EQ(push({0, 1, 2}, {{kA, {10}}})[0].version, 1U);
  shard.advance(decision(2, {member(0, 2)}));
  EXPECT_EQ(value(kA), (Floats{-11}));
}

// ---- decisions

TEST_P(ShardTest, AppliesDecisionsInTheirOrderAndEachOnce) {
  define(1, RuleKind::kSgd, 1);
  push(kFirst, {{kA, {1}}});
  error_of(ErrorCode::DECISION_GAP, [&] { shard.advance(decision(2, {member(0, 1)})); });
  shard.advance(decision(1, {member(0, 1)}));
  shard.advance(decision(1, {member(0, 1)}));
  EXPECT_EQ(shard.version(), 1U);
  EXPECT_EQ(value(kA), (Floats{-1}));
}

TEST_P(ShardTest, TakesTheStepWithoutAContributionThatIsMissing) {
  define(1, RuleKind::kSgd, 1);
  define(2, RuleKind::kSgd, 1);
  push(kFirst, {{kA, {1}}});
  EXPECT_TRUE(shard.missing().empty());
  shard.advance(decision(1, {member(0, 1)}));
  EXPECT_EQ(value(kA), (Floats{-1}));
  EXPECT_EQ(value(kB), (Floats{0}));
  EXPECT_EQ(shard.missing(), (std::vector<Origin>{kFirst}));
}

TEST_P(ShardTest, NeedsHyperParametersForGroupsThatTakeTheStepOnly) {
  define(1, RuleKind::kSgd, 1);
  const auto without_hypers = [](std::vector<Member> members) {
    return Decision(1, false, 1.0, std::move(members), {});
  };
  push(kFirst, {{kA, {1}}});
  error_of(ErrorCode::BAD_HYPER, [&] { shard.advance(without_hypers({member(0, 1)})); });
  EXPECT_EQ(shard.version(), 0U);
  shard.advance(without_hypers({member(0, 1, {1})}));
  EXPECT_EQ(shard.version(), 1U);
}

TEST_P(ShardTest, SkipsADecisionThatSaysSkipWhateverWasPushed) {
  define(1, RuleKind::kSgd, 1);
  push(kFirst, {{kA, {1}}});
  shard.advance(decision(1, {member(0, 1), member(1, 1)}, /*skip=*/true));
  EXPECT_TRUE(shard.settle(-1));
  EXPECT_EQ(value(kA), (Floats{0}));
  EXPECT_EQ(look(kA).version, 0U);
  EXPECT_EQ(shard.stats().at("staged_bytes"), 0U);
  EXPECT_EQ(shard.stats().at("skipped"), 1U);
}

TEST_P(ShardTest, SettlesSoManySlotsAtATimeAndSaysWhenItIsDone) {
  Values gradients;
  for (uint64_t tensor = 1; tensor <= 3; ++tensor) {
    define(tensor, RuleKind::kSgd, 1);
    gradients.push_back({make_key(tensor, 0), {1}});
  }
  push(kFirst, gradients);
  EXPECT_TRUE(shard.settle(-1));
  shard.advance(decision(1, {member(0, 1)}));
  EXPECT_FALSE(shard.settle(1));
  EXPECT_EQ(shard.stats().at("applied_in_place"), 1U);
  EXPECT_FALSE(shard.settle(1));
  EXPECT_TRUE(shard.settle(1));
  EXPECT_EQ(shard.stats().at("applied_in_place"), 3U);
}

TEST_P(ShardTest, SettlesSoManyBytesAtATimeOfWhatTheDecisionChanges) {
  define(1, RuleKind::kSgd, 2);
  define(2, RuleKind::kSgd, 1);
  define(3, RuleKind::kSgd, 1);
  push(kFirst, {{kA, {1, 1}}, {kB, {1}}, {make_key(3, 0), {1}}});
  shard.advance(decision(1, {member(0, 1)}));
  EXPECT_FALSE(shard.settle(-1, 8));
  EXPECT_EQ(shard.stats().at("applied_in_place"), 1U);
  EXPECT_TRUE(shard.settle(-1, 5));
  EXPECT_EQ(shard.stats().at("applied_in_place"), 3U);
}

TEST_P(ShardTest, KnowsThatTouchingTheLastSlotFinishedTheDecision) {
  define(1, RuleKind::kSgd, 1);
  define(2, RuleKind::kSgd, 1);
  push(kFirst, {{kA, {1}}, {kB, {1}}});
  shard.advance(decision(1, {member(0, 1)}));
  value(kA);
  EXPECT_FALSE(shard.settle(0));
  value(kB);
  EXPECT_TRUE(shard.settle(0));
}

TEST_P(ShardTest, FinishesADecisionBeforeTheNextOneAndBeforeADrop) {
  define(1, RuleKind::kSgd, 1);
  define(2, RuleKind::kSgd, 1);
  push(kFirst, {{kA, {1}}, {kB, {1}}});
  shard.advance(decision(1, {member(0, 1)}));
  shard.advance(decision(2, {member(0, 2, {1, 2})}));
  EXPECT_EQ(look(kA).version, 1U);
  EXPECT_EQ(value(kA), (Floats{-1}));
  shard.drop(1);
  EXPECT_TRUE(shard.settle(0));
  EXPECT_EQ(value(kB), (Floats{-1}));
}

TEST_P(ShardTest, LeavesTensorsDefinedAfterADecisionOutOfIt) {
  shard.advance(decision(1, {member(0, 1)}));
  define(1, RuleKind::kSgd, 1);
  EXPECT_TRUE(shard.settle(-1));
  push({0, 1, 2}, {{kA, {1}}});
  shard.advance(decision(2, {member(0, 2)}));
  EXPECT_EQ(value(kA), (Floats{-1}));
}

// ---- first values and plain writes

TEST_P(ShardTest, InitialisesOnce) {
  define(1, RuleKind::kSgd, 1, /*zeros=*/false);
  EXPECT_EQ(look(kA).status, ErrorCode::NOT_INITIALISED);
  initialise({{kA, {3}}});
  initialise({{kA, {4}}});
  EXPECT_EQ(value(kA), (Floats{3}));
  EXPECT_EQ(look(kA).version, 0U);
}

TEST_P(ShardTest, AssignsAndAddsOncePerSequence) {
  define(1, RuleKind::kAssign, 2);
  write(WriteKind::kAssign, 1, {{kA, {1, 2}}});
  EXPECT_EQ(write(WriteKind::kAdd, 2, {{kA, {1, 1}}})[0].version, 2U);
  EXPECT_EQ(write(WriteKind::kAdd, 2, {{kA, {1, 1}}})[0].version, 2U);
  EXPECT_EQ(value(kA), (Floats{2, 3}));
  EXPECT_EQ(shard.last_sequence("client"), 2U);
  EXPECT_EQ(shard.stats().at("duplicates"), 1U);
}

TEST_P(ShardTest, RefusesAWriteThatLacksThoseBeforeIt) {
  define(1, RuleKind::kAdd, 1);
  error_of(ErrorCode::UNEXPECTED_MESSAGE, [&] { write(WriteKind::kAdd, 2, {{kA, {1}}}); });
  EXPECT_EQ(value(kA), (Floats{0}));
}

TEST_P(ShardTest, CountsTheSequenceOfAWriteThatWasRefusedWhole) {
  define(1, RuleKind::kAdd, 1);
  EXPECT_EQ(write(WriteKind::kAdd, 1, {{kUnknown, {1}}})[0].status, ErrorCode::UNKNOWN_KEY);
  EXPECT_EQ(write(WriteKind::kAdd, 2, {{kA, {1}}})[0].status, ErrorCode::OK);
}

TEST_P(ShardTest, AssignsToWhatHasNoValueButDoesNotAddToIt) {
  define(1, RuleKind::kAssign, 1, /*zeros=*/false);
  EXPECT_EQ(write(WriteKind::kAdd, 1, {{kA, {1}}})[0].status, ErrorCode::NOT_INITIALISED);
  EXPECT_EQ(write(WriteKind::kAssign, 2, {{kA, {1}}})[0].status, ErrorCode::OK);
  EXPECT_EQ(value(kA), (Floats{1}));
}

TEST_P(ShardTest, AnswersAWriteThatComesAgainAsTheFirstTime) {
  define(1, RuleKind::kAdd, 1, /*zeros=*/false);
  define(2, RuleKind::kAdd, 1);
  const Values values{{kUnknown, {1}}, {kA, {1}}, {kB, {1}}};
  const std::vector<ErrorCode> first{ErrorCode::UNKNOWN_KEY, ErrorCode::NOT_INITIALISED,
                                     ErrorCode::OK};
  EXPECT_EQ(statuses_of(write(WriteKind::kAdd, 1, values)), first);
  EXPECT_EQ(write(WriteKind::kAdd, 2, {{kA, {1}}})[0].status, ErrorCode::NOT_INITIALISED);
  initialise({{kA, {5}}});
  define(tensor_of(kUnknown), RuleKind::kAdd, 1);
  EXPECT_EQ(statuses_of(write(WriteKind::kAdd, 1, values)), first);
  EXPECT_EQ(write(WriteKind::kAdd, 2, {{kA, {1}}})[0].status, ErrorCode::NOT_INITIALISED);
  EXPECT_EQ(value(kA), (Floats{5}));
  EXPECT_EQ(value(kB), (Floats{1}));
  EXPECT_EQ(value(kUnknown), (Floats{0}));
  shard.drop(2);
  EXPECT_EQ(statuses_of(write(WriteKind::kAdd, 1, values)),
            first);  // it was applied, and then dropped
  EXPECT_EQ(write(WriteKind::kAdd, 3, {{kA, {1}}})[0].status, ErrorCode::OK);
}

TEST(ShardMemoryTest, TakesAWriteWholeOrNotAtAllWhereReadersHoldItsSlices) {
  constexpr uint64_t kElems = 1 << 18;  // 1 MiB
  for (const WriteKind kind : {WriteKind::kAdd, WriteKind::kAssign}) {
    ShardOptions options;
    options.max_memory_bytes = 6 << 20;
    Shard shard(options);
    std::vector<SliceEntry> entries(2);
    for (size_t index = 0; index < entries.size(); ++index) {
      const Key key = make_key(index + 1, 0);
      const RuleKind rule = kind == WriteKind::kAdd ? RuleKind::kAdd : RuleKind::kAssign;
      shard.define({index + 1, DType::kFloat32, rule, 0, true, {{key, kElems}}});
      entries[index].key = key;
      entries[index].dtype =
          DType::kFloat16;  // is not kept as it comes: what is read needs other memory
      entries[index].num_bytes = kElems * 2;
    }
    const auto write = [&](uint64_t sequence) {
      std::vector<SliceEntry> sent = entries;
      const BufferRef payload = admit(shard, kind, sent, kElems * 4);
      std::memset(payload->data(), 0x3C, payload->size());
      shard.write(kind, "client", sequence, sent, payload);
      return statuses_of(sent);
    };
    const std::vector<ErrorCode> whole(2, ErrorCode::OK);
    EXPECT_EQ(write(1), whole);
    std::vector<SliceEntry> asked(2);
    for (size_t index = 0; index < asked.size(); ++index) asked[index].key = entries[index].key;
    Shard::Reply held = shard.read(asked, 64 << 20);
    shard.define({3, DType::kFloat32, RuleKind::kAssign, 0, true, {{make_key(3, 0), kElems * 2}}});
    error_of(ErrorCode::OUT_OF_MEMORY,
             [&] { write(2); });  // 1 MiB is for the payload, 1 MiB is left
    std::vector<SliceEntry> after(2);
    for (size_t index = 0; index < after.size(); ++index) after[index].key = entries[index].key;
    shard.read(after, 64 << 20);
    EXPECT_EQ(after[0].version, 1U);
    EXPECT_EQ(after[1].version, 1U);
    EXPECT_EQ(shard.last_sequence("client"), 1U);
    held = {};
    EXPECT_EQ(write(2), whole);
  }
}

TEST_P(ShardTest, ServesSlicesOfZeroElementsWithoutAPayload) {
  define(1, RuleKind::kSgd, 0);
  auto entries = entries_for({{kA, {}}});
  shard.stage(kFirst, entries, BufferRef());
  EXPECT_EQ(entries[0].status, ErrorCode::OK);
  shard.advance(decision(1, {member(0, 1)}));
  EXPECT_EQ(value(kA), (Floats{}));
  EXPECT_EQ(look(kA).version, 1U);
}

// ---- reads

TEST_P(ShardTest, AnswersEachSliceOfAPull) {
  define(1, RuleKind::kAssign, 2);
  define(2, RuleKind::kSgd, 1, /*zeros=*/false);
  write(WriteKind::kAssign, 1, {{kA, {1, 2}}});
  std::vector<SliceEntry> entries = entries_for({{kA, {}}, {kUnknown, {}}, {kB, {}}, {kA, {}}});
  entries[3].dtype = DType::kFloat64;
  const Shard::Reply reply = read(entries);
  EXPECT_EQ(statuses_of(entries),
            (Statuses{ErrorCode::OK, ErrorCode::UNKNOWN_KEY, ErrorCode::NOT_INITIALISED,
                      ErrorCode::DTYPE_MISMATCH}));
  EXPECT_EQ(entries[0].num_bytes, 8U);
  EXPECT_EQ(entries[0].version, 1U);
  EXPECT_EQ(reply.payload_bytes, 8U);
  EXPECT_EQ(reply.pieces.size(), 1U);
}

TEST_P(ShardTest, SendsOnlyValuesAsNewAsAskedFor) {
  define(1, RuleKind::kAssign, 1);
  write(WriteKind::kAssign, 1, {{kA, {1}}});
  EXPECT_EQ(look(kA, 0).status, ErrorCode::OK);
  EXPECT_EQ(look(kA, 1).status, ErrorCode::OK);
  const SliceEntry newer = look(kA, 2);
  EXPECT_EQ(newer.status, ErrorCode::NOT_MODIFIED);
  EXPECT_EQ(newer.version, 1U);
  EXPECT_EQ(newer.num_bytes, 0U);
}

TEST_P(ShardTest, ConvertsAPullToHalfPrecision) {
  define(1, RuleKind::kAssign, 2);
  write(WriteKind::kAssign, 1, {{kA, {1, 2}}});
  std::vector<SliceEntry> entries = entries_for({{kA, {}}});
  entries[0].dtype = DType::kBFloat16;
  const Shard::Reply reply = read(entries);
  ASSERT_EQ(reply.payload_bytes, 4U);
  EXPECT_EQ(elements_of<uint16_t>(reply.pieces, reply.ready),
            (std::vector<uint16_t>{0x3F80, 0x4000}));
}

TEST_P(ShardTest, KeepsWhatAReaderHoldsWhileUpdatesGoOn) {
  const size_t num_elems = kSharedValueBytes / sizeof(float);
  define(1, RuleKind::kSgd, num_elems);
  std::vector<SliceEntry> entries = entries_for({{kA, {}}});
  const Shard::Reply held = read(entries);
  for (uint64_t round = 1; round <= 3; ++round) {
    push({0, 1, round}, {{kA, Floats(num_elems, 1)}});
    shard.advance(decision(round, {member(0, round)}));
    EXPECT_EQ(value(kA), Floats(num_elems, -static_cast<float>(round)));
  }
  EXPECT_EQ(elements_of(held.pieces, held.ready), Floats(num_elems, 0));
  EXPECT_EQ(shard.stats().at("applied_out_of_place"), 1U);
  EXPECT_EQ(shard.stats().at("applied_in_place"), 2U);
}

// ---- reading as of a decision -----------------------------------------------------------------------

// The value of slice 0 of tensor 1, or what kept it from being read.
std::variant<Floats, ErrorCode> value_at(Shard& shard, uint64_t at, uint16_t part = 0) {
  std::vector<SliceEntry> entries(1);
  entries[0].key = make_key(1, 0);
  entries[0].part = part;
  const Shard::Reply reply = shard.read(entries, 64 << 20, {.at = at});
  if (entries[0].status != ErrorCode::OK) return entries[0].status;
  return elements_of(reply.pieces, reply.ready);
}

TEST_P(ShardTest, HoldsWhatASlotWasFromTheVersionThatItIsAtOn) {
  define(1, RuleKind::kSgd, 2);
  const auto step = [&](uint64_t round) {
    push({0, 1, round}, {{make_key(1, 0), {1.0F, 2.0F}}});
    shard.advance(decision(round, {member(0, round)}));
  };
  step(1);
  EXPECT_EQ(shard.hold(7, /*state=*/false), 1u);
  for (uint64_t round = 2; round <= 4; ++round) step(round);
  const Floats at_one = value(make_key(1, 0));
  for (uint64_t at = 1; at <= 3; ++at) {
    const auto found = std::get<Floats>(value_at(shard, at));
    EXPECT_EQ(found[0] * 4.0F, at_one[0] * static_cast<float>(at));
  }
  EXPECT_EQ(value_at(shard, 0), (std::variant<Floats, ErrorCode>(ErrorCode::VERSION_GONE)));
  EXPECT_GT(shard.stats().at("kept_bytes"), 0u);
  EXPECT_TRUE(shard.settle_hold(7, 2));
  EXPECT_TRUE(shard.settle_hold(7, 2));
  EXPECT_FALSE(shard.settle_hold(7, 3));
  EXPECT_FALSE(shard.settle_hold(8, 2));
  EXPECT_EQ(value_at(shard, 1), (std::variant<Floats, ErrorCode>(ErrorCode::VERSION_GONE)));
  EXPECT_TRUE(std::holds_alternative<Floats>(value_at(shard, 2)));
  EXPECT_EQ(shard.stats().at("kept_bytes"), 2 * sizeof(float));
  shard.release_hold(7);
  EXPECT_EQ(value_at(shard, 2), (std::variant<Floats, ErrorCode>(ErrorCode::VERSION_GONE)));
  EXPECT_EQ(shard.stats().at("kept_bytes"), 0u);
  EXPECT_EQ(shard.stats().at("holds"), 0u);
}

TEST_P(ShardTest, ASlotThatDoesNotChangeKeepsNothingAndIsReadAsItIs) {
  define(1, RuleKind::kSgd, 2);
  define(2, RuleKind::kSgd, 2);
  push({0, 1, 1}, {{make_key(1, 0), {1.0F, 2.0F}}});
  shard.advance(decision(1, {member(0, 1)}));
  const Floats before = value(make_key(1, 0));
  shard.hold(7, /*state=*/true);
  push({0, 1, 2}, {{make_key(2, 0), {1.0F, 2.0F}}});
  shard.advance(decision(2, {member(0, 2, /*lacking=*/{1})}));
  value(make_key(2, 0));
  EXPECT_EQ(std::get<Floats>(value_at(shard, 1)), before);
  EXPECT_EQ(std::get<Floats>(value_at(shard, 2)), before);
}

TEST_P(ShardTest, RuleStateIsHeldWhereItWasAskedFor) {
  for (const bool state : {false, true}) {
    Shard one(options());
    one.define({1, DType::kFloat32, RuleKind::kSgd, 0, true, {{make_key(1, 0), 2}}});
    const auto step = [&](uint64_t round) {
      std::vector<SliceEntry> entries = entries_for({{make_key(1, 0), {1.0F, 2.0F}}});
      const auto pool = make_pool();
      admit(one, WriteKind::kPush, entries, 8);
      one.stage({0, 1, round}, entries, buffer_of(*pool, Floats{1.0F, 2.0F}));
      one.advance(Decision(round, false, 1.0, {member(0, round)}, {{0, sgd(1.0, 0.9)}}));
      one.settle(-1);
    };
    step(1);
    const auto before = std::get<Floats>(value_at(one, 1, 1));
    one.hold(7, state);
    step(2);
    if (state) {
      EXPECT_EQ(std::get<Floats>(value_at(one, 1, 1)), before);
    } else {
      EXPECT_EQ(value_at(one, 1, 1), (std::variant<Floats, ErrorCode>(ErrorCode::VERSION_GONE)));
    }
    EXPECT_NE(std::get<Floats>(value_at(one, 2, 1)), before);
  }
}

TEST_P(ShardTest, WhatTakesMoreThanMayBeKeptIsGivenUpAndTheStepIsTaken) {
  ShardOptions narrow = options();
  narrow.max_kept_bytes = 7;
  Shard one(narrow);
  one.define({1, DType::kFloat32, RuleKind::kSgd, 0, true, {{make_key(1, 0), 2}}});
  one.hold(7, false);
  std::vector<SliceEntry> entries = entries_for({{make_key(1, 0), {1.0F, 2.0F}}});
  const auto pool = make_pool();
  admit(one, WriteKind::kPush, entries, 8);
  one.stage({0, 1, 1}, entries, buffer_of(*pool, Floats{1.0F, 2.0F}));
  one.advance(decision(1, {member(0, 1)}));
  one.settle(-1);
  EXPECT_EQ(one.stats().at("kept_bytes"), 0u);
  EXPECT_FALSE(one.settle_hold(7, 0));
  EXPECT_EQ(value_at(one, 0), (std::variant<Floats, ErrorCode>(ErrorCode::VERSION_GONE)));
  EXPECT_TRUE(std::holds_alternative<Floats>(value_at(one, 1)));
}

// ---- being written elsewhere, and read back ---------------------------------------------------------

TEST_P(ShardTest, IsWrittenAsOfADecisionAndGoesOnFromThereInAnotherShard) {
  const TensorDefinition definition{1, DType::kFloat32, RuleKind::kSgd,
                                    0, false,           {{make_key(1, 0), 2}, {make_key(1, 1), 1}}};
  Shard first(options());
  first.define(definition);
  std::vector<SliceEntry> entries =
      entries_for({{make_key(1, 0), {1.0F, 2.0F}}, {make_key(1, 1), {3.0F}}});
  const auto pool = make_pool();
  admit(first, WriteKind::kInit, entries, 12);
  first.initialise(entries, buffer_of(*pool, Floats{1.0F, 2.0F, 3.0F}));
  const auto step = [&](Shard& one, uint64_t round) {
    std::vector<SliceEntry> pushed =
        entries_for({{make_key(1, 0), {1.0F, 2.0F}}, {make_key(1, 1), {3.0F}}});
    admit(one, WriteKind::kPush, pushed, 12);
    one.stage({0, 1, round}, pushed, buffer_of(*pool, Floats{0.5F, -1.0F, 2.0F}));
    one.advance(Decision(round, false, 1.0, {member(0, round)}, {{0, sgd(1.0, 0.9)}}));
    one.settle(-1);
  };
  step(first, 1);
  first.hold(7, /*state=*/true);
  EXPECT_THROW(first.image(8, 1), Error);
  step(first, 2);
  const std::optional<TableImage> image = first.image(7, 1);
  ASSERT_TRUE(image);
  ASSERT_EQ(image->slots.size(), 2U);
  Shard second(options());
  second.set_version(1);
  second.define(definition);
  for (const SlotImage& slot : image->slots) {
    EXPECT_EQ(slot.version, 1U);
    EXPECT_EQ(slot.num_steps, 1U);
    EXPECT_EQ(slot.parts, 0b11U);
    std::vector<BufferRef> parts;
    for (uint16_t part = 0; part < 2; ++part) {
      const std::vector<std::pair<Key, uint16_t>> wanted{{slot.key, part}};
      const Gathered read = first.read(*image, wanted);
      if (read.ready) read.ready->wait();
      ASSERT_EQ(read.pieces.size(), 1U);
      parts.push_back(second.allocate(read.pieces[0].num_bytes));
      std::memcpy(parts.back()->data(), read.pieces[0].buffer->data(), read.pieces[0].num_bytes);
    }
    second.load(slot, parts);
    EXPECT_THROW(second.load(slot, parts), Error) << "it is not new any more";
  }
  step(second, 2);
  for (const SlotImage& slot : image->slots) {
    EXPECT_EQ(first.state(slot.key), second.state(slot.key));
  }
  first.release_hold(7);
  EXPECT_THROW(first.image(7, 1), Error);
}

TEST_P(ShardTest, RefusesToLoadStateThatTheRuleHasNot) {
  define(1, RuleKind::kSgd, 1);
  const auto pool = make_pool();
  const BufferRef part = buffer_of(*pool, Floats{1});
  error_of(ErrorCode::BAD_ARGUMENT,
           [&] { shard.load({kA, 1, 1, 0b101}, std::vector<BufferRef>{part, BufferRef(), part}); });
  EXPECT_EQ(shard.stats().at("state_bytes"), 0U);
  shard.load({kA, 1, 1, 0b011}, std::vector<BufferRef>{part, part});
  EXPECT_EQ(shard.stats().at("state_bytes"), sizeof(float));
}

TEST_P(ShardTest, RefusesAPullThatOneReplyCannotHold) {
  define(1, RuleKind::kAssign, 2);
  std::vector<SliceEntry> entries = entries_for({{kA, {}}, {kA, {}}});
  error_of(ErrorCode::FRAME_TOO_LARGE, [&] { shard.read(entries, 15); });
  EXPECT_EQ(shard.read(entries, 16).payload_bytes, 16U);
}

TEST_P(ShardTest, ShowsTheStateOfASlice) {
  define(1, RuleKind::kSgd, 1);
  push(kFirst, {{kA, {1}}});
  shard.advance(Decision(1, false, 1.0, {member(0, 1)}, {{0, sgd(1.0, 0.9)}}));
  std::vector<std::string> names;
  for (const auto& [name, bytes] : shard.state(kA)) names.push_back(name);
  EXPECT_EQ(names, (std::vector<std::string>{"value", "momentum_buffer", "step"}));
  EXPECT_EQ(shard.stats().at("state_bytes"), sizeof(float));
  error_of(ErrorCode::UNKNOWN_KEY, [&] { shard.state(kUnknown); });
}

}  // namespace
}  // namespace psstore::testing
