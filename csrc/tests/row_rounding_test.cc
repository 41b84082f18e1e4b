// Rows whose values are bfloat16: widened without loss, and rounded by lots that have the computed value as their mean.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/half.h"
#include "core/philox.h"
#include "kernels/rows.h"
#include "rows/row_store.h"

namespace psstore {
namespace {

constexpr RoundingLots kLots{.key = 0x0123456789ABCDEF, .decision = 41};

// SGD of lr 1 with the same gradient in all columns: a value becomes itself minus that, rounded.
std::vector<BFloat16> stepped(std::vector<BFloat16> row, float gradient, uint64_t id,
                              const RoundingLots& lots = kLots) {
  Hyper hyper;
  hyper.lr = 1;
  const std::vector<float> gradients(row.size(), gradient);
  const Contribution contribution{gradients.data(), DType::kFloat32, 1.0F, 0};
  const RowToStep step{reinterpret_cast<std::byte*>(row.data()), {&contribution, 1}, id};
  step_rows({.hyper = &hyper,
             .dim = static_cast<uint32_t>(row.size()),
             .dtype = DType::kBFloat16,
             .lots = lots},
            {&step, 1});
  return row;
}

std::vector<uint16_t> bits_of(const std::vector<BFloat16>& row) {
  std::vector<uint16_t> bits;
  for (const BFloat16 one : row) bits.push_back(one.bits);
  return bits;
}

double mean_of(const std::vector<BFloat16>& row) {
  double sum = 0;
  for (const BFloat16 one : row) sum += to_float(one);
  return sum / static_cast<double>(row.size());
}

TEST(RowRounding, leaves_all_that_bfloat16_can_say) {
  for (uint32_t begin = 0; begin < 0x10000; begin += kMaxRowDim) {
    std::vector<BFloat16> row;
    for (uint32_t i = 0; i < kMaxRowDim; ++i) row.push_back({static_cast<uint16_t>(begin + i)});
    const std::vector<BFloat16> after = stepped(row, 0.0F, begin);
    for (size_t i = 0; i < row.size(); ++i) {
      if (std::isnan(to_float(row[i]))) {
        EXPECT_TRUE(std::isnan(to_float(after[i])));
      } else {
        ASSERT_EQ(after[i].bits, row[i].bits);
      }
    }
  }
}

TEST(RowRounding, is_to_one_of_the_two_neighbours_and_has_the_value_as_its_mean) {
  // bfloat16 has steps of 2^-7 from 1 on, and of 2^-8 below: 1 - x lies between 1 - 2^-8 and 1.
  constexpr double kStep = 0x1p-8;
  for (const double part : {0x1p-10, 0.1, 0.5, 0.9}) {
    const double exact = 1 - static_cast<double>(static_cast<float>(part * kStep));
    double sum = 0;
    constexpr int kRows = 256;
    constexpr int kDim = 512;
    for (uint64_t id = 0; id < kRows; ++id) {
      const std::vector<BFloat16> row = stepped(std::vector<BFloat16>(kDim, to_bfloat16(1.0F)),
                                                static_cast<float>(part * kStep), id);
      for (const BFloat16 one : row) {
        ASSERT_TRUE(to_float(one) == 1.0F || to_float(one) == 1.0F - static_cast<float>(kStep));
      }
      sum += mean_of(row);
    }
    const double deviation = kStep * std::sqrt(part * (1 - part) / (kRows * kDim));
    EXPECT_NEAR(sum / kRows, exact, 4 * deviation) << part;
  }
}

TEST(RowRounding, has_steps_far_below_bfloat16s_add_up) {
  constexpr int kDim = 4096;
  constexpr int kSteps = 64;
  constexpr float kGradient = 0x1p-14F;  // of 2^-8, what bfloat16 tells apart below 1, a 64th
  std::vector<BFloat16> row(kDim, to_bfloat16(1.0F));
  const std::vector<BFloat16> first = row;
  for (uint64_t decision = 1; decision <= kSteps; ++decision) {
    row = stepped(row, kGradient, 3, {kLots.key, decision});
  }
  EXPECT_EQ(to_bfloat16(1.0F - kGradient).bits, first[0].bits);  // the nearest would stay
  const double deviation = 0x1p-8 * std::sqrt(kSteps * (1.0 / 64) / kDim);
  EXPECT_NEAR(mean_of(row), 1.0 - kSteps * double{kGradient}, 4 * deviation);
}

TEST(RowRounding, is_a_function_of_the_table_the_id_the_decision_and_the_column) {
  const std::vector<BFloat16> row(100, to_bfloat16(1.0F));
  constexpr float kGradient = 0x1p-9F;
  const auto rounded = [&](uint64_t id, const RoundingLots& lots) {
    return bits_of(stepped(row, kGradient, id, lots));
  };
  const std::vector<uint16_t> once = rounded(7, kLots);
  EXPECT_EQ(rounded(7, kLots), once);
  EXPECT_NE(rounded(8, kLots), once);
  EXPECT_NE(rounded(7, {kLots.key, kLots.decision + 1}), once);
  EXPECT_NE(rounded(7, {kLots.key + 1, kLots.decision}), once);
  for (size_t i = 0; i < row.size(); ++i) {
    const RandomWords words = philox(kLots.key, 7, kLots.decision * 512 + i / 8);
    const uint32_t lot = words.word[i % 8 / 2] >> (i % 2 * 16) & 0xFFFFU;
    ASSERT_EQ(once[i], to_bfloat16(1.0F - kGradient, lot).bits) << i;
  }
}

TEST(RowRounding, stays_at_infinity_and_has_no_number_become_nan) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const uint32_t lot : {0U, 1U, 0xFFFFU}) {
    EXPECT_EQ(to_float(to_bfloat16(kInfinity, lot)), kInfinity);
    EXPECT_EQ(to_float(to_bfloat16(-kInfinity, lot)), -kInfinity);
    EXPECT_FALSE(std::isnan(to_float(to_bfloat16(std::numeric_limits<float>::max(), lot))));
    EXPECT_TRUE(
        std::isnan(to_float(to_bfloat16(std::numeric_limits<float>::signaling_NaN(), lot))));
    EXPECT_TRUE(std::isnan(to_float(to_bfloat16(__builtin_bit_cast(float, 0x7FFFFFFFU), lot))));
  }
}

TEST(RowStoreOfBFloat16, begins_a_row_with_the_nearest_of_its_first_values) {
  const FirstValues normal{FirstValueKind::kNormal, 0, 1, 3};
  const RowShape shape{
      .dim = 5, .state_elems = 2, .sum_elems = 1, .has_usage = true, .dtype = DType::kBFloat16};
  EXPECT_EQ(shape.record_bytes(), 8u + 5 * 2 + 2 * 4 + 4);
  RowStore store(shape, normal, [pool = BufferPool::create(0)](size_t num_bytes) {
    return pool->allocate(num_bytes);
  });
  std::vector<float> wide(shape.dim);
  write_first_values(normal, 9, shape.dim, DType::kFloat32,
                     reinterpret_cast<std::byte*>(wide.data()));
  std::vector<uint16_t> expected;
  for (const float one : wide) expected.push_back(to_bfloat16(one).bits);
  const uint64_t ids[] = {9};
  std::vector<uint16_t> found(shape.dim);
  store.read(ids, reinterpret_cast<std::byte*>(found.data()));
  EXPECT_EQ(found, expected);

  store.reserve(ids);
  const RowNumber row = store.add(9, 0.5F);
  store.set_usage(row, 77);
  found.assign(shape.dim, 0);
  store.read(ids, reinterpret_cast<std::byte*>(found.data()));
  EXPECT_EQ(found, expected);
  EXPECT_EQ(store.first_sum(row), 0.5F);
  EXPECT_EQ(store.usage(row), 77u);
}

}  // namespace
}  // namespace psstore
