// The bytes that the kernels give on every kind of machine: checksums recorded on x86-64, of inputs that come from
// integers alone. What a rule does is held against torch elsewhere; here, that the target changes nothing: no
// contraction of a product and a sum, no other rounding, no other order.
#include <gtest/gtest.h>

#include <array>
#include <ostream>
#include <vector>

#include "core/crc32c.h"
#include "kernels/kernel_set.h"

namespace psstore {
namespace {

constexpr int64_t kElems = 2048 + 256 + 13;

constexpr DType kLossyEncodings[] = {DType::kInt8, DType::kSign, DType::kTopK};
constexpr DType kInputs[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16,
                             DType::kInt8,    DType::kSign,     DType::kTopK};

// Numbers of both signs, most of them near 1 and each sixteenth 2^-16 times as large: exact in float32.
template <class T>
std::vector<T> numbers(uint32_t seed) {
  std::vector<T> found(kElems);
  uint32_t bits = seed * 2654435761U + 1;
  for (T& number : found) {
    bits = bits * 1664525U + 1013904223U;  // Numerical Recipes, section 7.1
    const auto fraction = static_cast<T>(static_cast<int32_t>(bits) >> 8);
    number = fraction / static_cast<T>(bits % 16 == 0 ? int64_t{1} << 38 : int64_t{1} << 22);
  }
  return found;
}

class Checksum {
 public:
  void add(const void* data, size_t num_bytes) {
    value_ = crc32c({static_cast<const std::byte*>(data), num_bytes}, value_);
  }
  template <class T>
  void add(const std::vector<T>& elements) {
    add(elements.data(), elements.size() * sizeof(T));
  }
  uint32_t value() const { return value_; }

 private:
  uint32_t value_ = 0;
};

std::vector<std::byte> encoded(const KernelSet& kernels, DType dtype, uint32_t seed,
                               std::vector<float>* residual = nullptr) {
  const std::vector<float> source = numbers<float>(seed);
  std::vector<std::byte> payload(encoded_bytes(dtype, kElems, kElems / 16));
  if (is_encoding(dtype)) {
    kernels.encode({.encoding = dtype,
                    .source = source.data(),
                    .residual = residual == nullptr ? nullptr : residual->data(),
                    .num_elems = kElems,
                    .num_kept = kElems / 16,
                    .payload = payload.data()});
  } else {
    kernels.convert(DType::kFloat32, dtype, source.data(), payload.data(), kElems);
  }
  return payload;
}

Hyper hyper_of(RuleKind rule, bool with_options) {
  Hyper hyper;
  hyper.lr = 0.01;
  hyper.beta1 = 0.9;
  hyper.beta2 = 0.999;
  hyper.eps = 1e-8;
  hyper.alpha = 0.99;
  if (!with_options) return hyper;
  hyper.momentum = rule == RuleKind::kSgd || rule == RuleKind::kRmsProp ? 0.9 : 0;
  if (rule == RuleKind::kDelayedNesterov)
    hyper.momentum = 0.9, hyper.every = 2, hyper.activation = 0.25;
  hyper.weight_decay = 0.03;
  hyper.amsgrad = true;
  hyper.centered = true;
  return hyper;
}

// Adds what three steps make of value and states.
template <class T>
void add_steps(Checksum& checksum, const KernelSet& kernels, SliceUpdate update) {
  std::vector<T> value = numbers<T>(99);
  std::vector<T> states[kMaxStates];
  const bool has_states = applies_by_decision(update.rule);
  const StateLayout layout = has_states ? state_layout(update.rule, *update.hyper) : StateLayout{};
  update.dtype = sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32;
  update.num_elems = kElems;
  update.value_in = update.value_out = value.data();
  for (size_t slot = 0; slot < kMaxStates; ++slot) {
    if (!layout.uses(static_cast<int>(slot))) continue;
    states[slot].resize(kElems);
    update.state[slot] = states[slot].data();
  }
  for (update.step = 1; update.step <= 3; ++update.step) {
    update.state_is_new = update.step == 1 ? 0b111 : 0;
    kernels.reduce_update(update);
  }
  checksum.add(value);
  for (const std::vector<T>& state : states) checksum.add(state);
}

uint32_t checksum_of_rule(const KernelSet& kernels, RuleKind rule) {
  Checksum checksum;
  for (const DType dtype : kInputs) {
    for (const size_t num_workers : {1U, 3U, 4U, 8U}) {
      std::vector<std::vector<std::byte>> payloads;
      std::vector<Contribution> contributions;
      for (uint32_t rank = 0; rank < num_workers; ++rank) {
        payloads.push_back(encoded(kernels, dtype, rank));
        contributions.push_back(
            {payloads.back().data(), dtype, rank == 2 ? 0.3F : 1.0F, payloads.back().size()});
      }
      for (const bool with_options : {false, true}) {
        const Hyper hyper = hyper_of(rule, with_options);
        SliceUpdate update;
        update.rule = rule;
        update.hyper = &hyper;
        update.contributions = contributions;
        update.divisor = static_cast<double>(num_workers);
        update.scale = with_options ? 0.7 : 1.0;
        add_steps<float>(checksum, kernels, update);
        add_steps<double>(checksum, kernels, update);
      }
    }
  }
  return checksum.value();
}

struct RuleChecksum {
  RuleKind rule;
  uint32_t checksum;
};

void PrintTo(const RuleChecksum& one, std::ostream* out) {
  *out << "rule " << static_cast<int>(one.rule);
}

class RuleParityTest : public ::testing::TestWithParam<RuleChecksum> {};

TEST_P(RuleParityTest, TheStepsOfARuleHaveTheBytesOfEveryMachine) {
  for (const KernelSet* kernels : runnable_kernels()) {
    EXPECT_EQ(checksum_of_rule(*kernels, GetParam().rule), GetParam().checksum) << kernels->name;
  }
}

INSTANTIATE_TEST_SUITE_P(Rules, RuleParityTest,
                         ::testing::Values(RuleChecksum{RuleKind::kAssign, 0x1215B2CD},
                                           RuleChecksum{RuleKind::kAdd, 0x866BFB22},
                                           RuleChecksum{RuleKind::kSgd, 0x7270354C},
                                           RuleChecksum{RuleKind::kAdam, 0xB8E95EFE},
                                           RuleChecksum{RuleKind::kAdamW, 0x182A6EED},
                                           RuleChecksum{RuleKind::kAdagrad, 0x9F901D22},
                                           RuleChecksum{RuleKind::kRmsProp, 0x8421404C},
                                           RuleChecksum{RuleKind::kReduce, 0x1215B2CD},
                                           RuleChecksum{RuleKind::kDelayedNesterov, 0xB7FC9177}));

TEST(ParityTest, PayloadsAndResidualsHaveTheBytesOfEveryMachine) {
  for (const KernelSet* kernels : runnable_kernels()) {
    Checksum checksum;
    for (const DType dtype : kLossyEncodings) {
      std::vector<float> residual = numbers<float>(7);
      for (const uint32_t seed : {1U, 2U}) {
        checksum.add(encoded(*kernels, dtype, seed, &residual));
        checksum.add(residual);
      }
    }
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      checksum.add(encoded(*kernels, dtype, 3));
    }
    EXPECT_EQ(checksum.value(), 0x97A8E58F) << kernels->name;
  }
}

TEST(ParityTest, SumsOfSquaresHaveTheBytesOfEveryMachine) {
  for (const KernelSet* kernels : runnable_kernels()) {
    Checksum checksum;
    for (const DType dtype : kInputs) {
      const std::vector<std::byte> payloads[] = {
          encoded(*kernels, dtype, 1), encoded(*kernels, dtype, 2), encoded(*kernels, dtype, 3)};
      std::vector<Contribution> contributions;
      for (const auto& payload : payloads) {
        contributions.push_back({payload.data(), dtype, 1.0F, payload.size()});
      }
      SliceUpdate update;
      update.num_elems = kElems;
      update.contributions = contributions;
      update.divisor = 3;
      const double squares = kernels->reduced_squares(update);
      checksum.add(&squares, sizeof squares);
    }
    EXPECT_EQ(checksum.value(), 0x6703E2D8) << kernels->name;
  }
}

}  // namespace
}  // namespace psstore
