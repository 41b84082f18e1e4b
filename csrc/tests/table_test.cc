// The parts of a table around its slots: definitions, decisions, ranks, the write window, gathering.
#include <limits>
#include <map>
#include <random>

#include "table/dense_table.h"
#include "table/gather.h"
#include "table/rank_book.h"
#include "table/slot_index.h"
#include "table/write_window.h"
#include "table_support.h"

namespace psstore::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// ---- the index of slots

TEST(SlotIndexTest, FindsWhatIsThereWhoeverCameAndWentBefore) {
  std::mt19937_64 random(1);
  std::map<Key, Slot> slots;
  SlotIndex index;
  for (int step = 0; step < 20'000; ++step) {
    const Key key = make_key(random() % 40, random() % 40);
    const auto known = slots.find(key);
    EXPECT_EQ(index.find(key), known == slots.end() ? nullptr : &known->second);
    if (known == slots.end()) {
      const SlotSpec spec{key, 1, DType::kFloat32, RuleKind::kSgd, 0};
      index.insert(key, &slots.emplace(key, Slot(spec, 0)).first->second);
    } else {
      index.erase(key);
      slots.erase(known);
    }
  }
  for (auto& [key, slot] : slots) EXPECT_EQ(index.find(key), &slot);
}

// ---- definitions

TEST(TensorDefinitionTest, RefusesWhatCannotBeStored) {
  const auto refused = [](const TensorDefinition& definition) {
    return error_of(ErrorCode::BAD_ARGUMENT, [&] { definition.check(); });
  };
  const Key key = make_key(1, 0);
  refused({1, DType::kBFloat16, RuleKind::kSgd, 0, true, {}});
  refused({1, static_cast<DType>(9), RuleKind::kSgd, 0, true, {}});
  refused({1, DType::kFloat32, static_cast<RuleKind>(0), 0, true, {}});
  refused({1, DType::kFloat32, static_cast<RuleKind>(9), 0, true, {}});
  refused({1, DType::kFloat32, RuleKind::kSgd, 0, true, {{make_key(2, 0), 1}}});
  refused({1, DType::kFloat32, RuleKind::kSgd, 0, true, {{key, 1}, {key, 1}}});
  refused({1, DType::kFloat64, RuleKind::kSgd, 0, true, {{key, uint64_t{1} << 29}}});
}

TEST(TensorDefinitionTest, RefusesReductionsThatThereAreNotOrThatTheRuleHasNot) {
  const auto defined = [](RuleKind rule, Reduction reduction) {
    TensorDefinition{1, DType::kFloat32, rule, 0, true, {}, {}, reduction}.check();
  };
  const auto refused = [&](RuleKind rule, Reduction reduction) {
    return error_of(ErrorCode::BAD_ARGUMENT, [&] { defined(rule, reduction); });
  };
  defined(RuleKind::kSgd, {ReductionKind::kMedian, 0});
  defined(RuleKind::kReduce, {ReductionKind::kTrimmedMean, 2});
  refused(RuleKind::kSgd, {static_cast<ReductionKind>(3), 0});
  refused(RuleKind::kSgd, {ReductionKind::kMean, 1});
  refused(RuleKind::kSgd, {ReductionKind::kMedian, 1});
  refused(RuleKind::kSgd, {ReductionKind::kTrimmedMean, 0});
  refused(RuleKind::kAssign, {ReductionKind::kMedian, 0});
  refused(RuleKind::kAdd, {ReductionKind::kMedian, 0});
}

TEST(ReductionTest, DropsAsManyAsLeaveSome) {
  const auto dropped = [](Reduction reduction) {
    std::vector<uint32_t> of;
    for (uint32_t members = 1; members <= 6; ++members)
      of.push_back(reduction.num_dropped(members));
    return of;
  };
  EXPECT_EQ(dropped({ReductionKind::kMedian, 0}), (std::vector<uint32_t>{0, 0, 1, 1, 2, 2}));
  EXPECT_EQ(dropped({ReductionKind::kTrimmedMean, 1}), (std::vector<uint32_t>{0, 0, 1, 1, 1, 1}));
  EXPECT_EQ(dropped({ReductionKind::kTrimmedMean, 2}), (std::vector<uint32_t>{0, 0, 1, 1, 2, 2}));
}

TEST(TensorDefinitionTest, SaysWhichWritesFit) {
  const SlotSpec single{make_key(1, 0), 2, DType::kFloat32, RuleKind::kSgd, 0};
  const SlotSpec twice{make_key(2, 0), 2, DType::kFloat64, RuleKind::kAssign, 0};
  const auto entry = [](uint32_t num_bytes, DType dtype) {
    SliceEntry made;
    made.num_bytes = num_bytes;
    made.dtype = dtype;
    return made;
  };
  const auto push = WriteKind::kPush;
  EXPECT_EQ(check_write(single, push, entry(8, DType::kFloat32)), ErrorCode::OK);
  EXPECT_EQ(check_write(single, push, entry(4, DType::kBFloat16)), ErrorCode::OK);
  EXPECT_EQ(check_write(single, push, entry(4, DType::kFloat16)), ErrorCode::OK);
  EXPECT_EQ(check_write(single, push, entry(16, DType::kFloat64)), ErrorCode::DTYPE_MISMATCH);
  EXPECT_EQ(check_write(single, push, entry(0, DType{})), ErrorCode::DTYPE_MISMATCH);
  EXPECT_EQ(check_write(single, push, entry(4, DType::kFloat32)), ErrorCode::SIZE_MISMATCH);
  EXPECT_EQ(check_write(twice, WriteKind::kAdd, entry(16, DType::kFloat64)), ErrorCode::OK);
  EXPECT_EQ(check_write(twice, WriteKind::kAdd, entry(8, DType::kFloat32)),
            ErrorCode::DTYPE_MISMATCH);
}

TEST(TensorDefinitionTest, SaysWhichStateCanBeRestored) {
  const SlotSpec spec{make_key(1, 0), 2, DType::kFloat32, RuleKind::kAdam, 0};
  const auto code = [&](uint16_t part, uint32_t num_bytes, uint64_t num_steps = 0,
                        DType dtype = DType::kFloat32) {
    SliceEntry entry;
    entry.part = part;
    entry.num_bytes = num_bytes;
    entry.version = num_steps;
    entry.dtype = dtype;
    return check_write(spec, WriteKind::kRestore, entry);
  };
  for (uint16_t part = 0; part <= 3; ++part) EXPECT_EQ(code(part, 8), ErrorCode::OK);
  EXPECT_EQ(code(0, 4, 0, DType::kFloat16), ErrorCode::OK);
  EXPECT_EQ(code(0, 0), ErrorCode::SIZE_MISMATCH);
  EXPECT_EQ(code(1, 0, uint64_t{1} << 53), ErrorCode::OK);
  EXPECT_EQ(code(1, 0, (uint64_t{1} << 53) + 1), ErrorCode::BAD_ARGUMENT);
  EXPECT_EQ(code(1, 4), ErrorCode::SIZE_MISMATCH);
  EXPECT_EQ(code(1, 4, 0, DType::kFloat16), ErrorCode::DTYPE_MISMATCH);
  EXPECT_EQ(code(4, 8), ErrorCode::RULE_MISMATCH);
}

TEST(TensorDefinitionTest, SaysWhichRulesHaveWhichState) {
  SliceEntry entry;
  entry.num_bytes = 4;
  const auto takes = [&](RuleKind rule, uint16_t part) {
    entry.part = part;
    const SlotSpec spec{make_key(1, 0), 1, DType::kFloat32, rule, 0};
    return check_write(spec, WriteKind::kRestore, entry) == ErrorCode::OK;
  };
  EXPECT_TRUE(takes(RuleKind::kSgd, 1));
  EXPECT_FALSE(takes(RuleKind::kSgd, 2));
  EXPECT_TRUE(takes(RuleKind::kRmsProp, 3));
  EXPECT_TRUE(takes(RuleKind::kDelayedNesterov, 2));
  EXPECT_FALSE(takes(RuleKind::kDelayedNesterov, 3));
  EXPECT_TRUE(takes(RuleKind::kReduce, 0));
  EXPECT_FALSE(takes(RuleKind::kReduce, 1));
  EXPECT_FALSE(takes(RuleKind::kAssign, 0));
  EXPECT_FALSE(takes(RuleKind::kAdd, 0));
}

TEST(TensorDefinitionTest, SaysWhichRulesTakeWhichWrites) {
  SliceEntry entry;
  entry.num_bytes = 4;
  const auto takes = [&](RuleKind rule, WriteKind kind) {
    const SlotSpec spec{make_key(1, 0), 1, DType::kFloat32, rule, 0};
    return check_write(spec, kind, entry) == ErrorCode::OK;
  };
  EXPECT_TRUE(takes(RuleKind::kSgd, WriteKind::kPush));
  EXPECT_TRUE(takes(RuleKind::kSgd, WriteKind::kInit));
  EXPECT_FALSE(takes(RuleKind::kSgd, WriteKind::kAssign));
  EXPECT_FALSE(takes(RuleKind::kSgd, WriteKind::kAdd));
  EXPECT_FALSE(takes(RuleKind::kAssign, WriteKind::kPush));
  EXPECT_TRUE(takes(RuleKind::kAssign, WriteKind::kAssign));
  EXPECT_TRUE(takes(RuleKind::kAssign, WriteKind::kAdd));
  EXPECT_FALSE(takes(RuleKind::kAdd, WriteKind::kAssign));
  EXPECT_TRUE(takes(RuleKind::kAdd, WriteKind::kAdd));
}

// ---- decisions

TEST(DecisionTest, RefusesWhatCannotBeApplied) {
  const auto refused = [](uint64_t number, double divisor, const std::vector<Member>& members) {
    error_of(ErrorCode::BAD_ARGUMENT, [&] { Decision(number, false, divisor, members, {}); });
  };
  refused(0, 1.0, {});
  refused(1, 0.0, {});
  refused(1, kInfinity, {});
  refused(1, 1.0, {member(1, 1), member(0, 1)});
  refused(1, 1.0, {member(1, 1), member(1, 1)});
  refused(1, 1.0, {{{0, 1, 1}, static_cast<float>(kInfinity), {}}});
}

TEST(DecisionTest, RefusesRangesThatAreNotAscendingAndDisjoint) {
  const auto refused = [](std::vector<std::pair<uint64_t, uint64_t>> present) {
    const Member odd{{0, 1, 1}, 1.0F, std::move(present)};
    error_of(ErrorCode::BAD_ARGUMENT, [&] { Decision(1, false, 1.0, {odd}, {}); });
  };
  refused({{2, 1}});
  refused({{5, 6}, {1, 2}});
  refused({{1, 5}, {5, 6}});
}

TEST(DecisionTest, KnowsWhichTensorsAMemberHas) {
  const Member some{{0, 1, 1}, 1.0F, {{3, 5}, {9, 9}}};
  for (const uint64_t id : {3u, 4u, 5u, 9u}) EXPECT_TRUE(some.has(id)) << id;
  for (const uint64_t id : {0u, 2u, 6u, 8u, 10u}) EXPECT_FALSE(some.has(id)) << id;
  EXPECT_FALSE(Member{}.has(0));
}

TEST(DecisionTest, FindsMembersByRank) {
  const Decision some = decision(1, {member(2, 5), member(4, 6), member(9, 7)});
  EXPECT_EQ(some.member(4)->origin.round, 6U);
  EXPECT_EQ(some.member(9)->origin.round, 7U);
  for (const uint32_t rank : {0u, 3u, 10u}) EXPECT_EQ(some.member(rank), nullptr) << rank;
}

TEST(DecisionTest, LeavesNothingOpenIfItIsASkip) {
  const Decision skip(1, true, 1.0, {}, {}, Open::kScale);
  EXPECT_FALSE(skip.needs_scale());
  EXPECT_FALSE(PendingDecision(skip).lacks_scale());
}

TEST(PendingDecisionTest, BecomesASkipIfItsScaleSaysSo) {
  PendingDecision scaled(scaled_decision(1, {}));
  EXPECT_TRUE(scaled.lacks_scale());
  scaled.set_scale(0.5);
  EXPECT_FALSE(scaled.lacks_scale() || scaled.skip());
  EXPECT_EQ(scaled.scale(), 0.5);
  PendingDecision skipped(scaled_decision(1, {}));
  skipped.set_scale({});
  EXPECT_TRUE(skipped.skip());
}

TEST(PendingDecisionTest, NeedsNoHyperParametersForRulesWithoutAny) {
  PendingDecision pending(Decision(1, false, 1.0, {}, {}));
  const SlotSpec spec{make_key(1, 0), 1, DType::kFloat32, RuleKind::kReduce, 0};
  pending.require_hyper(spec);
  pending.hyper(spec);
}

// ---- ranks

TEST(RankBookTest, RefusesEarlierLivesOfARankOnly) {
  RankBook book;
  EXPECT_EQ(book.meet({0, 2, 1}), Standing::kOpen);
  EXPECT_EQ(book.meet({0, 1, 9}), Standing::kStale);
  EXPECT_EQ(book.meet({1, 1, 9}), Standing::kOpen);
}

TEST(RankBookTest, KnowsDecidedRoundsOfTheLatestLife) {
  RankBook book;
  book.record(decision(1, {member(0, 5)}));
  EXPECT_EQ(book.meet({0, 1, 5}), Standing::kDecided);
  EXPECT_EQ(book.meet({0, 1, 6}), Standing::kOpen);
  EXPECT_EQ(book.meet({0, 2, 5}), Standing::kOpen);
}

TEST(RankBookTest, TellsARoundThatWasDecidedEarlyFromTheOthers) {
  RankBook book;
  book.record(early_decision(1, {member(0, 5)}));
  EXPECT_EQ(book.meet({0, 1, 4}), Standing::kDecided);
  EXPECT_EQ(book.meet({0, 1, 5}), Standing::kPromised);
  EXPECT_EQ(book.meet({0, 1, 6}), Standing::kOpen);
  book.record(decision(2, {member(0, 6)}));
  EXPECT_EQ(book.meet({0, 1, 5}), Standing::kDecided);
  EXPECT_EQ(book.meet({0, 1, 6}), Standing::kDecided);
  book.record(early_decision(3, {member(0, 7)}));
  EXPECT_EQ(book.meet({0, 2, 7}), Standing::kOpen);
  EXPECT_EQ(book.meet({0, 1, 7}), Standing::kStale);
}

TEST(RankBookTest, LearnsOfALifeFromADecision) {
  RankBook book;
  book.meet({0, 1, 1});
  book.record(Decision(1, false, 1.0, {{{0, 2, 3}, 1.0F, {}}}, {}));
  EXPECT_EQ(book.meet({0, 1, 4}), Standing::kStale);
  EXPECT_EQ(book.meet({0, 2, 3}), Standing::kDecided);
}

// ---- the write window

bool take(WriteWindow& window, const std::string& name, uint64_t sequence) {
  const auto client = window.client(name);
  const MutexLock lock(client->mutex);
  return client->take(sequence);
}

TEST(WriteWindowTest, TakesEachSequenceOnce) {
  WriteWindow window;
  EXPECT_TRUE(take(window, "a", 1));
  EXPECT_FALSE(take(window, "a", 1));
  EXPECT_TRUE(take(window, "a", 2));
  EXPECT_FALSE(take(window, "a", 1));
  EXPECT_TRUE(take(window, "b", 1));
  EXPECT_EQ(window.last_sequence("a"), 2U);
  EXPECT_EQ(window.last_sequence("nobody"), 0U);
}

TEST(WriteWindowTest, RefusesGapsAndZero) {
  WriteWindow window;
  error_of(ErrorCode::UNEXPECTED_MESSAGE, [&] { take(window, "a", 2); });
  error_of(ErrorCode::UNEXPECTED_MESSAGE, [&] { take(window, "a", 0); });
  EXPECT_TRUE(take(window, "a", 1));
}

TEST(WriteWindowTest, ForgetsWhoWroteLongestAgo) {
  WriteWindow window(2);
  take(window, "a", 1);
  take(window, "b", 1);
  take(window, "a", 2);
  take(window, "c", 1);
  EXPECT_EQ(window.last_sequence("a"), 2U);
  EXPECT_EQ(window.last_sequence("b"), 0U);
  EXPECT_EQ(window.last_sequence("c"), 1U);
}

// Entries with those statuses.
std::vector<SliceEntry> with(const std::vector<ErrorCode>& statuses) {
  std::vector<SliceEntry> entries(statuses.size());
  for (size_t i = 0; i < statuses.size(); ++i) entries[i].status = statuses[i];
  return entries;
}

std::vector<ErrorCode> recalled(const Refusals& refusals, uint64_t sequence, size_t num_slices) {
  std::vector<SliceEntry> entries(num_slices);
  for (SliceEntry& entry : entries) entry.status = ErrorCode::UNKNOWN_KEY;
  refusals.recall(sequence, entries);
  std::vector<ErrorCode> statuses;
  for (const SliceEntry& entry : entries) statuses.push_back(entry.status);
  return statuses;
}

constexpr ErrorCode kOk = ErrorCode::OK;
constexpr ErrorCode kFull = ErrorCode::TABLE_FULL;
constexpr ErrorCode kBad = ErrorCode::NON_FINITE;

TEST(RefusalsTest, RecallsEachSliceOfEachWrite) {
  const std::vector<ErrorCode> first{kOk, kFull, kFull, kBad, kOk, kFull};
  const std::vector<ErrorCode> third{kBad, kBad};
  Refusals refusals;
  refusals.note(1, with(first));
  refusals.note(2, with({kOk, kOk}));
  refusals.note(3, with(third));
  EXPECT_EQ(recalled(refusals, 1, 6), first);
  EXPECT_EQ(recalled(refusals, 2, 2), (std::vector{kOk, kOk}));
  EXPECT_EQ(recalled(refusals, 3, 2), third);
  EXPECT_EQ(recalled(refusals, 3, 1), (std::vector{kBad}));
  EXPECT_EQ(refusals.runs.size(), 4U);
}

TEST(RefusalsTest, DoesNotTakeTheEndOfOneWriteForTheBeginOfTheNext) {
  Refusals refusals;
  refusals.note(1, with({kFull}));
  refusals.note(2, with({kOk, kFull}));
  EXPECT_EQ(recalled(refusals, 1, 2), (std::vector{kFull, kOk}));
  EXPECT_EQ(recalled(refusals, 2, 2), (std::vector{kOk, kFull}));
}

TEST(RefusalsTest, ForgetsTheOldestWritesWholeAndSaysSo) {
  std::vector<ErrorCode> statuses;
  for (size_t i = 0; i < kMaxRefusedRuns; ++i) statuses.push_back(i % 2 == 0 ? kFull : kBad);
  Refusals refusals;
  refusals.note(3, with({kFull, kOk, kBad}));
  refusals.note(5, with({kFull}));
  refusals.note(7, with(std::vector(statuses.begin(), statuses.end() - 1)));
  EXPECT_EQ(recalled(refusals, 5, 1), (std::vector{kFull}));
  EXPECT_EQ(recalled(refusals, 4, 1), (std::vector{kOk}));
  error_of(ErrorCode::OVERLOADED, [&] { recalled(refusals, 3, 3); });
  error_of(ErrorCode::OVERLOADED, [&] { recalled(refusals, 2, 1); });
  refusals.note(8, with(statuses));
  EXPECT_EQ(recalled(refusals, 8, statuses.size()), statuses);
  error_of(ErrorCode::OVERLOADED, [&] { recalled(refusals, 7, 1); });
  EXPECT_EQ(refusals.runs.size(), kMaxRefusedRuns);
}

TEST(RefusalsTest, GoToAnotherWindow) {
  WriteWindow one, other;
  take(one, "a", 1);
  take(one, "b", 1);
  take(one, "b", 2);
  {
    const auto client = one.client("b");
    const MutexLock lock(client->mutex);
    client->refusals.note(2, with({kOk, kFull}));
  }
  const auto known = one.refusals();
  ASSERT_EQ(known.size(), 1U);
  other.load(one.all());
  other.load_refusals(known[0].first, known[0].second);
  EXPECT_EQ(other.refusals(), known);
  const auto client = other.client("b");
  const MutexLock lock(client->mutex);
  EXPECT_EQ(recalled(client->refusals, 2, 2), (std::vector{kOk, kFull}));
}

TEST(RefusalsTest, AreHeldAgainstTheirWriter) {
  WriteWindow window;
  window.load({{"a", 3}});
  const std::vector<Refusals> wrong{
      {4, {}},                                    // more is forgotten than there was
      {3, {{3, 0, 1, kFull}}},                    // of what is forgotten
      {0, {{4, 0, 1, kFull}}},                    // of a write to come
      {0, {{0, 0, 1, kFull}}},                    // of no write
      {0, {{1, 1, 1, kFull}}},                    // of no slice
      {0, {{1, 0, 2, kFull}, {1, 1, 3, kBad}}},   // one slice twice
      {0, {{2, 0, 1, kFull}, {1, 0, 1, kBad}}},   // out of order
      {0, {{1, 0, 1, kOk}}},                      // not refused
      {0, {{1, 0, 1, ErrorCode::NOT_MODIFIED}}},  // not refused, either
      {0, {{1, 0, 1, ErrorCode{200}}}},           // for no reason that there is
      {0, std::vector<RefusedRun>(kMaxRefusedRuns + 1, {1, 0, 1, kFull})},
  };
  for (const Refusals& one : wrong) {
    error_of(ErrorCode::BAD_BODY, [&] { window.load_refusals("a", one); });
  }
  error_of(ErrorCode::BAD_BODY, [&] { window.load_refusals("b", {}); });
  EXPECT_TRUE(window.refusals().empty());
  window.load_refusals("a", {1, {{2, 0, 1, kFull}, {2, 1, 2, kBad}, {3, 0, 9, kBad}}});
  EXPECT_EQ(window.refusals().size(), 1U);
}

// ---- gathering

Finding found(BufferPool& pool, size_t num_elems, float value, DType wanted = DType::kFloat32) {
  return {buffer_of(pool, Floats(num_elems, value)), DType::kFloat32, wanted, num_elems};
}

TEST(GatherTest, SharesLargeValuesAndCopiesRunsOfSmallOnes) {
  const auto pool = make_pool();
  const size_t large = kSharedValueBytes / sizeof(float);
  const std::vector<Finding> findings{found(*pool, large, 1), found(*pool, 2, 2),
                                      found(*pool, 1, 3), found(*pool, large, 4)};
  const std::vector<Piece> pieces = gather(findings, *pool);
  ASSERT_EQ(pieces.size(), 3U);
  EXPECT_EQ(pieces[0].buffer.get(), findings[0].value.get());
  EXPECT_EQ(floats_of(pieces[1].buffer), (Floats{2, 2, 3}));
  EXPECT_EQ(pieces[2].buffer.get(), findings[3].value.get());
}

TEST(GatherTest, ConvertsToTheEncodingThatIsWanted) {
  const auto pool = make_pool();
  const std::vector<Piece> pieces =
      gather({found(*pool, 2, 1, DType::kBFloat16), found(*pool, 1, 2, DType::kFloat16)}, *pool);
  ASSERT_EQ(pieces.size(), 1U);
  EXPECT_EQ(elements_of<uint16_t>(pieces[0].buffer->data(), pieces[0].num_bytes),
            (std::vector<uint16_t>{0x3F80, 0x3F80, 0x4000}));
}

TEST(GatherTest, MakesNoPieceOfNothing) {
  const auto pool = make_pool();
  EXPECT_TRUE(gather({}, *pool).empty());
  EXPECT_TRUE(gather({found(*pool, 0, 0)}, *pool).empty());
}

}  // namespace
}  // namespace psstore::testing
