// The fused pass where Python can't reach it: out of place, at odd addresses, with a caller that errs.
// That the numbers are right is held against torch by tests/kernels/test_update_rules.py.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "kernels/kernel_set.h"
#include "random_floats.h"

namespace psstore {
namespace {

constexpr int64_t kElems = 4099;  // eight blocks and a rest that fills no register

Hyper hyper_of(RuleKind rule) {
  Hyper hyper;
  hyper.lr = 0.01;
  hyper.momentum = rule == RuleKind::kSgd || rule == RuleKind::kRmsProp ? 0.9 : 0;
  hyper.every = 2;
  hyper.activation = 0.25;
  hyper.weight_decay = 0.03;
  hyper.beta1 = 0.9;
  hyper.beta2 = 0.999;
  hyper.eps = 1e-8;
  hyper.alpha = 0.99;
  hyper.amsgrad = true;
  hyper.centered = true;
  return hyper;
}

constexpr RuleKind kRules[] = {RuleKind::kAssign,  RuleKind::kAdd,    RuleKind::kSgd,
                               RuleKind::kAdam,    RuleKind::kAdamW,  RuleKind::kAdagrad,
                               RuleKind::kRmsProp, RuleKind::kReduce, RuleKind::kDelayedNesterov};

// One slice of a rule, as a table would own it.
struct Slice {
  explicit Slice(RuleKind kind)
      : rule(kind), hyper(hyper_of(kind)), value(random_floats(kElems, 1)) {
    for (Floats& buffer : state) buffer.assign(kElems, std::numeric_limits<float>::quiet_NaN());
  }

  SliceUpdate update(int64_t step, std::span<const Contribution> contributions) {
    SliceUpdate update;
    update.rule = rule;
    update.hyper = &hyper;
    update.step = step;
    update.num_elems = kElems;
    update.contributions = contributions;
    update.divisor = 2;
    update.value_in = update.value_out = value.data();
    for (size_t slot = 0; slot < kMaxStates; ++slot) update.state[slot] = state[slot].data();
    update.state_is_new = step == 1 ? 0b111 : 0;
    return update;
  }

  bool equals(const Slice& other) const {
    bool same = same_bytes(value, other.value);
    const StateLayout layout = state_layout(rule, hyper);
    for (int slot = 0; slot < kMaxStates; ++slot) {
      const auto index = static_cast<size_t>(slot);
      if (layout.uses(slot)) same = same && same_bytes(state[index], other.state[index]);
    }
    return same;
  }

  static bool same_bytes(const Floats& left, const Floats& right) {
    return std::memcmp(left.data(), right.data(), left.size() * sizeof(float)) == 0;
  }

  RuleKind rule;
  Hyper hyper;
  Floats value;
  std::array<Floats, kMaxStates> state;
};

class KernelTest : public testing::Test {
 protected:
  const Floats grads_[2] = {random_floats(kElems, 2), random_floats(kElems, 3)};
  const Contribution contributions_[2] = {{grads_[0].data(), DType::kFloat32, 0.5F},
                                          {grads_[1].data(), DType::kFloat32, 1.0F}};
};

TEST_F(KernelTest, EveryInstructionSetGivesTheSameBytes) {
  for (const RuleKind rule : kRules) {
    Slice plain(rule);
    for (int64_t step = 1; step <= 3; ++step) {
      kPlainKernels.reduce_update(plain.update(step, contributions_));
    }
    for (const KernelSet* kernels : runnable_kernels()) {
      Slice slice(rule);
      for (int64_t step = 1; step <= 3; ++step) {
        kernels->reduce_update(slice.update(step, contributions_));
      }
      EXPECT_TRUE(slice.equals(plain)) << kernels->name << ", rule " << static_cast<int>(rule);
    }
  }
}

TEST_F(KernelTest, OutOfPlaceGivesTheBytesOfInPlaceAndLeavesItsInput) {
  for (const RuleKind rule : kRules) {
    Slice in_place(rule);
    Slice out_of_place(rule);
    for (int64_t step = 1; step <= 3; ++step) {
      reduce_update(in_place.update(step, contributions_));
      const Floats before = out_of_place.value;
      Floats after(kElems);
      SliceUpdate update = out_of_place.update(step, contributions_);
      update.value_out = after.data();
      reduce_update(update);
      EXPECT_TRUE(Slice::same_bytes(before, out_of_place.value));
      out_of_place.value = after;
    }
    EXPECT_TRUE(out_of_place.equals(in_place)) << "rule " << static_cast<int>(rule);
  }
}

TEST_F(KernelTest, ContributionsMayLieAtOddAddresses) {
  Slice aligned(RuleKind::kSgd);
  reduce_update(aligned.update(1, contributions_));
  std::vector<std::byte> memory(kElems * sizeof(float) + 1);
  std::memcpy(memory.data() + 1, grads_[0].data(), kElems * sizeof(float));
  const Contribution shifted[] = {{memory.data() + 1, DType::kFloat32, 0.5F}, contributions_[1]};
  for (const KernelSet* kernels : runnable_kernels()) {
    Slice slice(RuleKind::kSgd);
    kernels->reduce_update(slice.update(1, shifted));
    EXPECT_TRUE(slice.equals(aligned)) << kernels->name;
  }
}

// What eight workers push of as many elements, at addresses that are a multiple of nothing.
std::vector<std::vector<std::byte>> payloads_of(DType dtype, int64_t num_elems) {
  const Floats floats = random_floats(static_cast<size_t>(num_elems) + 8, 4);
  std::vector<std::vector<std::byte>> payloads(8);
  for (size_t rank = 0; rank < payloads.size(); ++rank) {
    payloads[rank].resize(floats.size() * sizeof(float) + 1);
    std::byte* odd = payloads[rank].data() + 1;
    if (is_encoding(dtype)) {
      encode({dtype, floats.data() + rank, nullptr, nullptr, num_elems, 0, odd});
    } else {
      convert(DType::kFloat32, dtype, floats.data() + rank, odd, num_elems);
      std::memset(odd, 1, sizeof(uint16_t));  // of float16 a subnormal number
    }
  }
  return payloads;
}

Floats sum_with(const KernelSet& kernels, std::span<const Contribution> contributions,
                double divisor, int64_t num_elems) {
  Floats value(static_cast<size_t>(num_elems) + 8, 12345.0F);
  SliceUpdate update;
  update.num_elems = num_elems;
  update.contributions = contributions;
  update.divisor = divisor;
  update.scale = 0.3;
  update.value_in = update.value_out = value.data();
  kernels.reduce_update(update);
  return value;
}

class SumTest : public testing::TestWithParam<DType> {};

TEST_P(SumTest, HasTheBytesOfTheReferenceWhateverIsAddedAndDivided) {
  for (const int64_t num_elems : {1, 63, 255, 256, 1024 + 256 + 15}) {
    const auto payloads = payloads_of(GetParam(), num_elems);
    for (const size_t num_workers : {1U, 2U, 4U, 7U, 8U}) {
      // By a power of two, by another number, weighted, and by what has no inverse among the floats.
      for (const auto& [weight, divisor] :
           {std::pair{1.0F, 4.0}, {1.0F, 3.0}, {0.7F, 2.0}, {1.0F, 0x1p-130}}) {
        std::vector<Contribution> contributions;
        for (size_t rank = 0; rank < num_workers; ++rank) {
          contributions.push_back({payloads[rank].data() + 1, GetParam(), weight});
        }
        const Floats expected = sum_with(kPlainKernels, contributions, divisor, num_elems);
        for (const KernelSet* kernels : runnable_kernels()) {
          const Floats found = sum_with(*kernels, contributions, divisor, num_elems);
          EXPECT_TRUE(Slice::same_bytes(found, expected))
              << kernels->name << ", " << num_elems << " elements of " << num_workers
              << " workers by " << divisor;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, SumTest,
                         testing::Values(DType::kFloat32, DType::kBFloat16, DType::kFloat16,
                                         DType::kInt8, DType::kSign));

// Slices of several blocks; more workers than whose places in their payloads are remembered.
TEST(TopKSumTest, IsTheSumOfWhatThePayloadsSay) {
  constexpr int64_t kNumWorkers = 37;
  for (const int64_t num_elems : {1, 512, 5 * 512 + 7}) {
    std::vector<std::vector<std::byte>> payloads;
    std::vector<Floats> said;
    std::vector<Contribution> encoded, decoded;
    for (int64_t rank = 0; rank < kNumWorkers; ++rank) {
      const Floats floats =
          random_floats(static_cast<size_t>(num_elems), static_cast<uint32_t>(rank));
      const int64_t num_kept = num_elems * rank / (kNumWorkers - 1);  // from none to all
      payloads.emplace_back(static_cast<size_t>(num_kept) * kTopKEntryBytes);
      encode({DType::kTopK, floats.data(), nullptr, nullptr, num_elems, num_kept,
              payloads.back().data()});
      said.emplace_back(floats.size());
      decode({DType::kTopK, payloads.back().data(), payloads.back().size(),
              static_cast<uint64_t>(num_elems)},
             said.back().data());
      encoded.push_back({payloads.back().data(), DType::kTopK, 0.7F, payloads.back().size()});
      decoded.push_back({said.back().data(), DType::kFloat32, 0.7F});
    }
    for (const KernelSet* kernels : runnable_kernels()) {
      EXPECT_TRUE(Slice::same_bytes(sum_with(*kernels, encoded, 3, num_elems),
                                    sum_with(kPlainKernels, decoded, 3, num_elems)))
          << kernels->name << ", " << num_elems << " elements";
    }
  }
}

TEST_F(KernelTest, AScaledStepIsTheStepOfTheScaledGradient) {
  for (const RuleKind rule : kRules) {
    Slice scaled(rule);
    SliceUpdate update = scaled.update(1, contributions_);
    update.scale = 0.3;
    reduce_update(update);

    Slice gradient(RuleKind::kReduce);
    reduce_update(gradient.update(1, contributions_));
    for (float& element : gradient.value) element *= 0.3F;
    const Contribution sole[] = {{gradient.value.data(), DType::kFloat32, 1.0F}};
    Slice stepped(rule);
    update = stepped.update(1, sole);
    update.divisor = 1;
    reduce_update(update);
    EXPECT_TRUE(scaled.equals(stepped)) << "rule " << static_cast<int>(rule);
  }
}

TEST_F(KernelTest, TheShadowIsTheNewValueInHalfPrecision) {
  for (const KernelSet* kernels : runnable_kernels()) {
    Slice slice(RuleKind::kSgd);
    std::vector<uint16_t> shadow(kElems), rounded(kElems);
    SliceUpdate update = slice.update(1, contributions_);
    update.shadow = shadow.data();
    kernels->reduce_update(update);
    convert(DType::kFloat32, DType::kBFloat16, slice.value.data(), rounded.data(), kElems);
    EXPECT_EQ(shadow, rounded) << kernels->name;
  }
}

TEST_F(KernelTest, SquaresAreOfTheGradientBeforeTheScaleAndNeedNothingElse) {
  Slice gradient(RuleKind::kReduce);
  reduce_update(gradient.update(1, contributions_));
  SliceUpdate update;
  update.num_elems = kElems;
  const Contribution sole[] = {{gradient.value.data(), DType::kFloat32, 1.0F}};
  update.contributions = sole;
  const double squares = reduced_squares(update);
  EXPECT_GT(squares, 0);

  update.rule = RuleKind::kAdam;
  update.step = 0;
  update.contributions = contributions_;
  update.divisor = 2;
  update.scale = 0.3;
  EXPECT_EQ(reduced_squares(update), squares);
}

TEST_F(KernelTest, SquaresReadNothingPastTheSlice) {
  for (const KernelSet* kernels : runnable_kernels()) {
    for (size_t num_elems = 0; num_elems <= 70; ++num_elems) {
      // Exactly as long as it says, so that a sanitizer sees what is read beyond.
      const Floats ones(num_elems, 1.0F);
      const Contribution sole[] = {{ones.data(), DType::kFloat32, 1.0F}};
      SliceUpdate update;
      update.num_elems = static_cast<int64_t>(num_elems);
      update.contributions = sole;
      EXPECT_EQ(kernels->reduced_squares(update), static_cast<double>(num_elems)) << kernels->name;
    }
  }
}

TEST_F(KernelTest, NothingIsWrittenPastTheSlice) {
  constexpr float kGuard = 12345.0F;
  for (const KernelSet* kernels : runnable_kernels()) {
    for (int64_t num_elems = 0; num_elems <= 70; ++num_elems) {
      Slice slice(RuleKind::kAssign);
      slice.value.assign(kElems, kGuard);
      SliceUpdate update = slice.update(1, contributions_);
      update.num_elems = num_elems;
      kernels->reduce_update(update);
      for (size_t i = static_cast<size_t>(num_elems); i < 140; ++i) {
        ASSERT_EQ(slice.value[i], kGuard) << kernels->name << ", " << num_elems << " elements";
      }
    }
  }
}

TEST_F(KernelTest, AnUpdateThatBreaksTheContractIsRefusedBeforeAnythingIsWritten) {
  Slice slice(RuleKind::kAdam);
  const Floats before = slice.value;
  SliceUpdate without_state = slice.update(1, contributions_);
  without_state.state[1] = nullptr;
  SliceUpdate without_hyper = slice.update(1, contributions_);
  without_hyper.hyper = nullptr;
  SliceUpdate half_value = slice.update(1, contributions_);
  half_value.dtype = DType::kBFloat16;
  const Contribution wide[] = {{grads_[0].data(), DType::kFloat64, 1.0F}};
  const SliceUpdate narrowing = slice.update(1, wide);
  const SliceUpdate step_zero = slice.update(0, contributions_);
  for (const SliceUpdate& update :
       {without_state, without_hyper, half_value, narrowing, step_zero}) {
    EXPECT_THROW(reduce_update(update), Error);
  }
  EXPECT_THROW(reduced_squares(half_value), Error);
  EXPECT_THROW(reduced_squares(narrowing), Error);
  EXPECT_TRUE(Slice::same_bytes(before, slice.value));
}

TEST(StateLayoutTest, FollowsTheOptionsThatAskForABuffer) {
  Hyper hyper;
  EXPECT_FALSE(state_layout(RuleKind::kSgd, hyper).uses(0));
  hyper.momentum = 0.9;
  EXPECT_STREQ(state_layout(RuleKind::kSgd, hyper).names[0], "momentum_buffer");
  EXPECT_STREQ(state_layout(RuleKind::kRmsProp, hyper).names[1], "momentum_buffer");
  EXPECT_FALSE(state_layout(RuleKind::kRmsProp, hyper).uses(2));
  EXPECT_FALSE(state_layout(RuleKind::kAdam, hyper).uses(2));
  hyper.amsgrad = true;
  EXPECT_STREQ(state_layout(RuleKind::kAdam, hyper).names[2], "max_exp_avg_sq");
}

TEST(StateLayoutTest, TheLargestHoldsWhateverAnyOptionsAskFor) {
  for (const RuleKind rule : kRules) {
    const StateLayout largest = largest_state_layout(rule);
    for (const bool option : {false, true}) {
      Hyper hyper;
      hyper.momentum = option ? 0.9 : 0;
      hyper.amsgrad = hyper.centered = option;
      const StateLayout layout = state_layout(rule, hyper);
      for (int slot = 0; slot < kMaxStates; ++slot) {
        if (!layout.uses(slot)) continue;
        const auto index = static_cast<size_t>(slot);
        EXPECT_STREQ(layout.names[index], largest.names[index]) << static_cast<int>(rule);
      }
    }
  }
  EXPECT_FALSE(largest_state_layout(RuleKind::kReduce).uses(0));
}

}  // namespace
}  // namespace psstore
