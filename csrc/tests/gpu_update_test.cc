// The GPU's update kernels, their bodies run on the host: the bytes of the CPU's kernels, for every rule, size,
// alignment and kind of contribution.
#include "kernels/update.h"

#include <gtest/gtest.h>

#include <list>

#include "gpu_support.h"
#include "kernels/codec.h"

namespace psstore {
namespace {

struct RuleCase {
  RuleKind rule;
  Hyper hyper;
};

Hyper hyper_with(void (*change)(Hyper&)) {
  Hyper hyper;
  hyper.lr = 0.01;
  hyper.beta1 = 0.9;
  hyper.beta2 = 0.999;
  hyper.eps = 1e-8;
  hyper.alpha = 0.99;
  change(hyper);
  return hyper;
}

// Each form of a step, and each option within a form.
const std::vector<RuleCase>& rule_cases() {
  static const auto plain = hyper_with([](Hyper&) {});
  static const auto decayed =
      hyper_with([](Hyper& h) { h.weight_decay = 0.03, h.maximize = true; });
  static const auto momentum = hyper_with([](Hyper& h) { h.momentum = 0.9, h.dampening = 0.3; });
  static const auto nesterov = hyper_with([](Hyper& h) { h.momentum = 0.9, h.nesterov = true; });
  static const auto amsgrad = hyper_with([](Hyper& h) { h.amsgrad = true; });
  static const auto started = hyper_with([](Hyper& h) { h.initial_accumulator_value = 0.5; });
  static const auto centered = hyper_with([](Hyper& h) { h.centered = true; });
  static const auto both = hyper_with([](Hyper& h) { h.centered = true, h.momentum = 0.9; });
  static const auto delayed =
      hyper_with([](Hyper& h) { h.momentum = 0.9, h.every = 2, h.activation = 0.25; });
  static const std::vector<RuleCase> cases = {
      {RuleKind::kAssign, plain},
      {RuleKind::kAdd, plain},
      {RuleKind::kReduce, plain},
      {RuleKind::kSgd, plain},
      {RuleKind::kSgd, decayed},
      {RuleKind::kSgd, momentum},
      {RuleKind::kSgd, nesterov},
      {RuleKind::kAdam, plain},
      {RuleKind::kAdam, decayed},
      {RuleKind::kAdam, amsgrad},
      {RuleKind::kAdamW, decayed},
      {RuleKind::kAdagrad, started},
      {RuleKind::kRmsProp, decayed},
      {RuleKind::kRmsProp, momentum},
      {RuleKind::kRmsProp, centered},
      {RuleKind::kRmsProp, both},
      {RuleKind::kDelayedNesterov, delayed},
  };
  return cases;
}

// The dtypes of a step's contributions, in rank order.
using Ranks = std::vector<DType>;

std::vector<Ranks> rank_cases(DType tensor) {
  std::vector<Ranks> cases = {{}};
  for (const size_t count : {1U, 2U, 3U, 4U, 8U}) cases.emplace_back(count, DType::kFloat32);
  for (const size_t count : {1U, 2U, 4U, 8U}) cases.emplace_back(count, DType::kBFloat16);
  cases.emplace_back(7, DType::kFloat16);  // groups of four and of two, and one
  cases.emplace_back(6, DType::kInt8);
  cases.emplace_back(5, DType::kSign);
  if (tensor == DType::kFloat64) cases.emplace_back(3, DType::kFloat64);
  cases.push_back({DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kInt8, DType::kSign,
                   DType::kTopK});
  if (tensor == DType::kFloat64) cases.push_back({DType::kFloat64, DType::kTopK});
  return cases;
}

// A gradient of random numbers in memory of its own.
struct Gradient {
  Gradient(DType encoding, size_t num_elems, uint32_t seed, size_t shift)
      : dtype(encoding), payload(make(encoding, num_elems, seed, shift)) {}

  static Shifted make(DType dtype, size_t num_elems, uint32_t seed, size_t shift) {
    const Floats floats = random_floats(num_elems, seed);
    const size_t num_kept = num_elems / 5;
    Shifted payload(encoded_bytes(dtype, num_elems, num_kept), shift);
    const auto count = static_cast<int64_t>(num_elems);
    if (is_encoding(dtype)) {
      encode({.encoding = dtype,
              .source = floats.data(),
              .num_elems = count,
              .num_kept = static_cast<int64_t>(num_kept),
              .payload = payload.data()});
    } else {
      convert(DType::kFloat32, dtype, floats.data(), payload.data(), count);
    }
    return payload;
  }

  Contribution contribution(float weight) const {
    return {payload.data(), dtype, weight, payload.size()};
  }

  DType dtype;
  Shifted payload;
};

// What the ranks push for one slice.
class Pushes {
 public:
  Pushes(const Ranks& ranks, size_t num_elems, size_t shift) {
    for (const DType dtype : ranks) {
      const auto seed = static_cast<uint32_t>(gradients_.size() + 1);
      gradients_.emplace_back(dtype, num_elems, seed, shift);
      contributions_.push_back(gradients_.back().contribution(0.5F + static_cast<float>(seed)));
    }
  }
  std::span<const Contribution> contributions() const { return contributions_; }

 private:
  std::list<Gradient> gradients_;
  std::vector<Contribution> contributions_;
};

// A slice as a table owns it; whatever is new holds 0xFF, a NaN.
class Tensor {
 public:
  Tensor(const RuleCase& rule, DType dtype, size_t num_elems, size_t shift_elems)
      : rule_(&rule), dtype_(dtype), num_elems_(num_elems) {
    const size_t shift = shift_elems * dtype_bytes(dtype);
    const Floats start = random_floats(num_elems, 99);
    for (int buffer = 0; buffer <= kMaxStates; ++buffer) {
      Shifted& made = buffers_.emplace_back(num_elems * dtype_bytes(dtype), shift);
      if (made.size() > 0) std::memset(made.data(), 0xFF, made.size());
    }
    convert(DType::kFloat32, dtype, start.data(), buffers_[0].data(),
            static_cast<int64_t>(num_elems));
    buffers_.emplace_back(num_elems * sizeof(BFloat16), shift_elems * sizeof(BFloat16));
  }

  SliceUpdate update(int64_t step, std::span<const Contribution> contributions) {
    SliceUpdate update;
    update.rule = rule_->rule;
    update.hyper = &rule_->hyper;
    update.step = step;
    update.dtype = dtype_;
    update.num_elems = static_cast<int64_t>(num_elems_);
    update.contributions = contributions;
    update.divisor = step == 1 ? 1 : 3;
    update.scale = step == 1 ? 1 : 0.7;
    update.value_in = update.value_out = buffers_[0].data();
    const StateLayout layout = state_layout(rule_->rule, rule_->hyper);
    for (int slot = 0; slot < kMaxStates; ++slot) {
      const auto index = static_cast<size_t>(slot);
      if (layout.uses(slot)) update.state[index] = buffers_[index + 1].data();
    }
    update.state_is_new = step == 1 ? 0b111 : 0;
    update.shadow = step == 1 ? nullptr : buffers_.back().data();
    return update;
  }

  bool operator==(const Tensor& other) const { return buffers_ == other.buffers_; }

 private:
  const RuleCase* rule_;
  DType dtype_;
  size_t num_elems_;
  std::vector<Shifted> buffers_;  // value, states, shadow
};

constexpr size_t kSizes[] = {0, 1, 15, 16, 17, 255, 256, 257, 2500};

struct Layout {
  size_t value_elems;   // by which value, state and shadow are off a multiple of 16 bytes
  size_t source_bytes;  // and the contributions
};
constexpr Layout kLayouts[] = {{0, 0}, {1, 4}, {3, 0}, {0, 1}};

class GpuUpdateTest : public ::testing::TestWithParam<DType> {};

TEST_P(GpuUpdateTest, EveryRuleSizeAlignmentAndKindOfContributionGivesTheBytesOfTheCpu) {
  const DType dtype = GetParam();
  size_t layout = 0;
  for (const RuleCase& rule : rule_cases()) {
    for (const Ranks& ranks : rank_cases(dtype)) {
      for (const size_t num_elems : kSizes) {
        const Layout& place = kLayouts[layout++ % std::size(kLayouts)];
        const Pushes pushes(ranks, num_elems, place.source_bytes);
        Tensor cpu(rule, dtype, num_elems, place.value_elems);
        Tensor gpu(rule, dtype, num_elems, place.value_elems);
        for (int64_t step = 1; step <= 2; ++step) {
          reduce_update(cpu.update(step, pushes.contributions()));
          const SliceUpdate batch[] = {gpu.update(step, pushes.contributions())};
          reduce_update_like_a_gpu(batch);
        }
        ASSERT_EQ(gpu, cpu) << "rule " << static_cast<int>(rule.rule) << ", " << ranks.size()
                            << " contributions, " << num_elems << " elements, value "
                            << place.value_elems << " elements and sources " << place.source_bytes
                            << " bytes off";
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, GpuUpdateTest,
                         ::testing::Values(DType::kFloat32, DType::kFloat64));

// Blocks that have many chunks take several vectors at once, and the rest one by one.
TEST(GpuUpdateTest, BlocksOfManyChunksGiveTheBytesOfTheCpu) {
  const size_t num_elems = 1024U * 6 + 5;  // seven chunks: in one block, and then in two
  for (const RuleCase& rule : rule_cases()) {
    for (const Ranks& ranks : rank_cases(DType::kFloat32)) {
      const Pushes pushes(ranks, num_elems, 0);
      Tensor cpu(rule, DType::kFloat32, num_elems, 0);
      Tensor gpu = cpu;
      for (int64_t step = 1; step <= 2; ++step) {
        reduce_update(cpu.update(step, pushes.contributions()));
        const SliceUpdate batch[] = {gpu.update(step, pushes.contributions())};
        reduce_update_like_a_gpu(batch, step);
      }
      ASSERT_EQ(gpu, cpu) << "rule " << static_cast<int>(rule.rule) << ", " << ranks.size()
                          << " contributions";
    }
  }
}

TEST(GpuUpdateTest, ABatchOfAllKindsTakesALaunchForEachKindAndStepsEverySlice) {
  std::list<Pushes> pushes;
  std::vector<Tensor> cpu;
  for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
    for (const RuleCase& rule : rule_cases()) {
      for (const size_t num_elems : {700U, 0U, 5U, 4000U}) {
        cpu.emplace_back(rule, dtype, num_elems, num_elems % 3);
        pushes.emplace_back(Ranks{DType::kFloat32, DType::kBFloat16}, num_elems, 0);
      }
    }
  }
  std::vector<Tensor> gpu = cpu;
  std::vector<SliceUpdate> batch;
  auto pushed = pushes.begin();
  for (size_t i = 0; i < cpu.size(); ++i, ++pushed) {
    reduce_update(cpu[i].update(1, pushed->contributions()));
    batch.push_back(gpu[i].update(1, pushed->contributions()));
  }
  // The 14 forms without the second steps of SGD and of delayed Nesterov, in two dtypes.
  EXPECT_EQ(reduce_update_like_a_gpu(batch), 2 * 12);
  EXPECT_EQ(gpu, cpu);
}

TEST(GpuUpdateTest, OutOfPlaceLeavesItsInput) {
  const RuleCase& sgd = rule_cases()[3];
  const Pushes pushes({DType::kFloat32}, 1000, 0);
  Tensor expected(sgd, DType::kFloat32, 1000, 0);
  Tensor given = expected;
  reduce_update(expected.update(1, pushes.contributions()));
  Floats after(1000);
  SliceUpdate update = given.update(1, pushes.contributions());
  update.value_out = after.data();
  reduce_update_like_a_gpu({&update, 1});
  EXPECT_EQ(given, Tensor(sgd, DType::kFloat32, 1000, 0));
  EXPECT_EQ(std::memcmp(after.data(), expected.update(1, {}).value_in, 4000), 0);
}

TEST(GpuUpdateTest, ManySlicesTakeOneLaunchOfFullBlocks) {
  const RuleCase& sgd = rule_cases()[3];
  const Pushes pushes({DType::kFloat32}, 1024, 0);
  Tensor tensor(sgd, DType::kFloat32, 1024, 0);
  const std::vector<SliceUpdate> batch(10'000, tensor.update(1, pushes.contributions()));
  const HostTable table(gpu::Purpose::kUpdate, batch);
  int num_launches = 0;
  table.for_each_launch(
      [&](const gpu::Variant& variant, const gpu::Launch&, const gpu::BatchView& view) {
        ++num_launches;
        EXPECT_EQ(variant.sources, gpu::SourceForm::kFloat1);
        EXPECT_EQ(view.grid.num_blocks(), 5'000);
      });
  EXPECT_EQ(num_launches, 1);
}

TEST(GpuSquaresTest, HaveTheBitsOfTheCpu) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
    for (const Ranks& ranks : rank_cases(dtype)) {
      std::list<Pushes> pushes;
      std::vector<SliceUpdate> batch;
      std::vector<double> expected;
      for (const size_t num_elems : kSizes) {
        SliceUpdate& update = batch.emplace_back();
        update.dtype = dtype;
        update.num_elems = static_cast<int64_t>(num_elems);
        update.contributions = pushes.emplace_back(ranks, num_elems, num_elems % 5).contributions();
        update.divisor = 3;
        expected.push_back(reduced_squares(update));
      }
      EXPECT_EQ(reduced_squares_like_a_gpu(batch), expected) << ranks.size() << " contributions";
    }
  }
}

// ---- index arithmetic alone -------------------------------------------------------------------------

TEST(GpuMapTest, VectorsCoverEachElementOnce) {
  for (int lead = 0; lead < 4; ++lead) {
    for (int64_t num_elems = 0; num_elems <= 2100; num_elems += num_elems < 40 ? 1 : 103) {
      const gpu::VectorMap map{num_elems, 4, lead};
      std::vector<int> visits(static_cast<size_t>(num_elems));
      for (int64_t chunk = 0; chunk < map.num_chunks(); ++chunk) {
        for (int thread = 0; thread < gpu::kThreads; ++thread) {
          gpu::visit_vector(
              map, map.begin(chunk, thread),
              [&](int64_t begin) {
                for (int64_t e = 0; e < 4; ++e) ++visits[static_cast<size_t>(begin + e)];
              },
              [&](int64_t i) { ++visits[static_cast<size_t>(i)]; });
        }
      }
      EXPECT_EQ(visits, std::vector<int>(visits.size(), 1)) << num_elems << ", lead " << lead;
    }
  }
}

// Slices that no memory here could hold: their addresses are never followed.
TEST(GpuMapTest, SlicesBeyondTwoToTheThirtyOneAreCoveredByBlocksInOrder) {
  const int64_t sizes[] = {7, (int64_t{1} << 33) + 5, 0, (int64_t{1} << 31) + 1, 1};
  const RuleCase& assign = rule_cases()[0];
  std::vector<SliceUpdate> batch;
  for (const int64_t size : sizes) {
    SliceUpdate& update = batch.emplace_back();
    update.rule = assign.rule;
    update.num_elems = size;
    update.value_in = update.value_out = reinterpret_cast<void*>(uintptr_t{0x1004});
  }
  const HostTable table(gpu::Purpose::kUpdate, batch);
  table.for_each_launch([&](const gpu::Variant&, const gpu::Launch&, const gpu::BatchView& view) {
    EXPECT_LE(view.grid.num_blocks(), gpu::kMaxBlocks);
    std::vector<int64_t> next(batch.size(), 0);  // chunk that each slice is at
    for (int64_t block = 0; block < view.grid.num_blocks(); ++block) {
      gpu::visit_slices(view, block, [&](const gpu::Slice& slice, int64_t begin, int64_t end) {
        EXPECT_EQ(begin, next[slice.position]);
        next[slice.position] = end;
      });
    }
    for (size_t i = 0; i < batch.size(); ++i) {
      const gpu::VectorMap map{sizes[i], 4, 1};
      EXPECT_EQ(next[i], map.num_chunks());
      if (sizes[i] > 0) {
        EXPECT_GE(map.begin(next[i] - 1, gpu::kThreads - 1) + 4, sizes[i]);
        EXPECT_LT(map.begin(next[i] - 1, 0), sizes[i]);
      }
    }
  });
}

// ---- what the caller may get wrong ------------------------------------------------------------------

TEST(GpuPlanTest, ATensorThatIsNotAlignedToItsElementsIsRefused) {
  Floats value(8);
  SliceUpdate update;
  update.num_elems = 4;
  update.value_in = update.value_out = reinterpret_cast<std::byte*>(value.data()) + 2;
  EXPECT_THROW(gpu::Plan(gpu::Purpose::kUpdate, {&update, 1}), Error);
}

}  // namespace
}  // namespace psstore
