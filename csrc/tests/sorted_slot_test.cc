// A slot whose contributions are sorted over the members of a decision: who counts, and as what.
// That the numbers are numpy's is held by tests/kernels/test_sorted.py.
#include "table/slot.h"
#include "table_support.h"

namespace psstore::testing {
namespace {

constexpr uint64_t kSortedTensor = 7;
constexpr Key kSortedKey = make_key(kSortedTensor, 0);
constexpr Reduction kMedian{ReductionKind::kMedian, 0};

class SortedSlotTest : public ::testing::Test {
 protected:
  // What a step of lr 1 makes of zeros, negated: the reduced gradient. Rank r contributes `gradients[r]`.
  Floats reduced(Reduction reduction, const std::vector<Floats>& gradients,
                 std::vector<Member> members, double divisor = 1.0, bool averages = true) {
    const size_t num_elems = gradients.front().size();
    Slot slot({kSortedKey, num_elems, DType::kFloat32, RuleKind::kReduce, 0, {}, reduction}, 0,
              true);
    for (uint32_t rank = 0; rank < gradients.size(); ++rank) {
      slot.staging().offer({{rank, 1, 1}, slice_of(*backend, gradients[rank])});
    }
    const Decision made(1, false, divisor, std::move(members), {}, Open::kNothing, averages);
    PendingDecision pending(made);
    pending.require_hyper(slot.spec());
    slot.settle(pending, *backend);
    return floats_of(slot.value());
  }

  std::shared_ptr<Backend> backend = make_backend("cpu");
};

TEST_F(SortedSlotTest, TakesTheMiddleOfEachElement) {
  const std::vector<Floats> gradients{{1, -1e6F}, {2, 5}, {1e6F, 4}};
  EXPECT_EQ(reduced(kMedian, gradients, {member(0, 1), member(1, 1), member(2, 1)}),
            (Floats{2, 4}));
}

TEST_F(SortedSlotTest, TakesTheMeanOfWhatATrimLeaves) {
  const std::vector<Floats> gradients{{-1e6F}, {1}, {2}, {3}, {1e6F}};
  const std::vector<Member> members{member(0, 1), member(1, 1), member(2, 1), member(3, 1),
                                    member(4, 1)};
  EXPECT_EQ(reduced({ReductionKind::kTrimmedMean, 1}, gradients, members), (Floats{2}));
}

TEST_F(SortedSlotTest, CountsWhoHasNoGradientAsZeros) {
  EXPECT_EQ(reduced(kMedian, {{1e6F}},
                    {member(0, 1), member(1, 1, {kSortedTensor}), member(2, 1, {kSortedTensor})}),
            (Floats{0}));
}

TEST_F(SortedSlotTest, KnowsNoWeightsButTakesLossScalesOut) {
  std::vector<Member> members{member(0, 1), member(1, 1), member(2, 1)};
  members[0].weight = 1e18F;
  members[2].weight = 0.25F;
  members[2].loss_scale = 4;
  EXPECT_EQ(reduced(kMedian, {{1}, {2}, {12}}, members, 1e18), (Floats{2}));
  members[2].loss_scale = 8;
  EXPECT_EQ(reduced(kMedian, {{1}, {2}, {12}}, members, 1e18), (Floats{1.5F}));
}

TEST_F(SortedSlotTest, IsASumIfTheDecisionSaysSo) {
  EXPECT_EQ(reduced(kMedian, {{1}, {3}}, {member(0, 1), member(1, 1)}, 1.0, false), (Floats{4}));
}

TEST_F(SortedSlotTest, HasTheNormOfWhatIsLeft) {
  Slot slot({kSortedKey, 1, DType::kFloat32, RuleKind::kSgd, 0, {}, kMedian}, 0, true);
  const Floats gradients[] = {{1e6F}, {3}, {2}};
  for (uint32_t rank = 0; rank < 3; ++rank) {
    slot.staging().offer({{rank, 1, 1}, slice_of(*backend, gradients[rank])});
  }
  const Decision scaled = scaled_decision(1, {member(0, 1), member(1, 1), member(2, 1)});
  EXPECT_EQ(slot.squares(scaled, *backend)->value, 9);
}

}  // namespace
}  // namespace psstore::testing
