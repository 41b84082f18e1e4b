// A slot whose contributions are compensated: from where, for whom, and in which memory.
#include <cmath>

#include "shard_support.h"
#include "table/slot.h"
#include "table_support.h"

namespace psstore::testing {
namespace {

constexpr uint64_t kCompensatedTensor = 7;
constexpr Key kCompensatedKey = make_key(kCompensatedTensor, 0);
constexpr double kStrength = 0.5;

// What g, taken at `base`, does to `value` in a step of lr 1.
float stepped(double value, double g, double base) {
  return static_cast<float>(value - (g + kStrength * g * g * (value - base)));
}

class BasesTest : public ::testing::Test {
 protected:
  BasesTest() { slot.initialise(slice_of(*backend, {8}), *backend); }

  // That life of the rank takes a gradient at what it was sent last, and the decision is on it alone.
  Floats step(const Life& life, float gradient, std::map<std::string, double> hyper = sgd(1.0)) {
    const uint64_t number = ++number_;
    slot.staging().offer({{life.rank, life.incarnation, number}, slice_of(*backend, {gradient})});
    Member one = member(life.rank, number);
    one.origin.incarnation = life.incarnation;
    PendingDecision pending(Decision(number, false, 1.0, {one}, {{0, std::move(hyper)}}));
    pending.require_hyper(slot.spec());
    slot.settle(pending, *backend);
    return floats_of(slot.value());
  }
  void send(const Life& life) { EXPECT_TRUE(slot.note_base(life, *backend)); }

  std::shared_ptr<Backend> backend = make_backend("cpu");
  Slot slot{{kCompensatedKey, 1, DType::kFloat32, RuleKind::kSgd, 0, {}, {}, kStrength}, 0};

 private:
  uint64_t number_ = 0;
};

constexpr Life kFirst{0, 1}, kSecond{1, 1};

TEST_F(BasesTest, CompensatesFromWhatItsWorkerWasSent) {
  send(kFirst);
  send(kSecond);
  EXPECT_EQ(step(kFirst, 2), (Floats{6}));  // nothing has happened since
  const float after = stepped(6, 1, 8);
  EXPECT_EQ(step(kSecond, 1), (Floats{after}));
  send(kSecond);
  const float last = stepped(after, -2, 8);
  EXPECT_EQ(step(kFirst, -2), (Floats{last}));
  EXPECT_EQ(step(kSecond, 1), (Floats{stepped(last, 1, after)}));
}

TEST_F(BasesTest, CompensatesWhatIsToGrowWithTheOtherSign) {
  send(kFirst);
  step(kSecond, 2);
  std::map<std::string, double> up = sgd(1.0);
  up["maximize"] = 1;
  // The gradient of what is to shrink is -1 here: its compensation is that of the formula.
  EXPECT_EQ(step(kFirst, 1, up), (Floats{stepped(6, -1, 8)}));
}

TEST_F(BasesTest, TakesAGradientAsItIsOfWhomNothingIsKnown) {
  send(kFirst);
  step(kFirst, 2);
  EXPECT_EQ(step(kSecond, 1), (Floats{5}));
  EXPECT_EQ(step({0, 2}, 1), (Floats{4}));  // a next life, which was sent nothing
}

TEST_F(BasesTest, KnowsALifeFromTheOneBefore) {
  send({0, 2});
  step(kSecond, 2);
  send(kFirst);  // late: the rank lives on
  EXPECT_EQ(step({0, 2}, 1), (Floats{stepped(6, 1, 8)}));
}

TEST_F(BasesTest, EndsWithARestoredValue) {
  send(kFirst);
  slot.restore_value(slice_of(*backend, {100}), 0, *backend);
  EXPECT_EQ(step(kFirst, 2), (Floats{98}));
}

TEST_F(BasesTest, CostsNothingUntilTheValueChangesAndThenAValueForEachWorker) {
  for (uint32_t rank = 0; rank < 3; ++rank) send({rank, 1});
  EXPECT_EQ(slot.base_bytes(), 0U);
  for (uint32_t rank = 0; rank < 3; ++rank) {  // each base is another value then
    step({rank, 1}, 1);
    send({rank, 1});
  }
  EXPECT_EQ(slot.base_bytes(), 3 * sizeof(float));  // two, and memory for the next value
  step(kFirst, 1);
  EXPECT_EQ(slot.base_bytes(), 3 * sizeof(float));
  const size_t most = backend->pool_bytes();
  for (uint32_t round = 0; round < 12; ++round) {
    step({round % 3, 1}, 1);
    send({round % 3, 1});
    EXPECT_EQ(slot.base_bytes(), 3 * sizeof(float));
  }
  EXPECT_EQ(backend->pool_bytes(), most);
}

TEST_F(BasesTest, IsNoBusinessOfASlotThatIsNotCompensated) {
  Slot plain({kCompensatedKey, 1, DType::kFloat32, RuleKind::kSgd, 0}, 0, true);
  plain.make_zeros(*backend);
  EXPECT_FALSE(plain.note_base(kFirst, *backend));
}

// ---- in a shard

TensorDefinition compensated_tensor(uint64_t num_elems) {
  return {.tensor_id = kCompensatedTensor,
          .rule = RuleKind::kSgd,
          .slices = {{kCompensatedKey, num_elems}},
          .compensation = kStrength};
}

TEST(BasesOfAShard, AreReservedWhenAWorkerIsFirstSentAValueOrItIsRefused) {
  constexpr uint64_t kElems = 1 << 16, kBytes = kElems * sizeof(float);
  Shard shard({.max_memory_bytes = 3 * kBytes});
  shard.define(compensated_tensor(kElems));
  const auto read_by = [&](uint32_t rank) {
    std::vector<SliceEntry> entries{{.key = kCompensatedKey}};
    shard.read(entries, kBytes, {.worker = Life{rank, 1}});
    return entries[0].status;
  };
  EXPECT_EQ(read_by(0), ErrorCode::OK);
  EXPECT_EQ(read_by(0), ErrorCode::OK);
  EXPECT_EQ(read_by(1), ErrorCode::OK);
  EXPECT_EQ(read_by(2), ErrorCode::OUT_OF_MEMORY);
  shard.drop(kCompensatedTensor);
  EXPECT_EQ(shard.stats()["memory_bytes"], 0U);
}

TEST(BasesOfAShard, AreNotOnADevice) {
  Shard shard({.backend = make_backend("fake:0?seed=1")});
  error_of(ErrorCode::BAD_ARGUMENT, [&] { shard.define(compensated_tensor(1)); });
}

TEST(Compensation, IsRefusedWhereNothingStepsByAGradient) {
  for (const RuleKind rule : {RuleKind::kAssign, RuleKind::kAdd, RuleKind::kReduce}) {
    TensorDefinition definition = compensated_tensor(1);
    definition.rule = rule;
    error_of(ErrorCode::BAD_ARGUMENT, [&] { definition.check(); });
  }
  for (const double strength : {-1.0, std::nan("")}) {
    TensorDefinition definition = compensated_tensor(1);
    definition.compensation = strength;
    error_of(ErrorCode::BAD_ARGUMENT, [&] { definition.check(); });
  }
}

}  // namespace
}  // namespace psstore::testing
