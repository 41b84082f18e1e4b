// IdRanges against a plain set, and how many ranges it takes.
#include "core/id_ranges.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <set>

namespace psstore::testing {
namespace {

TEST(IdRanges, HoldWhatWasInserted) {
  std::mt19937 random(1);
  IdRanges ranges;
  std::set<uint64_t> expected;
  for (int step = 0; step < 2000; ++step) {
    const uint64_t id = random() % 500;
    ranges.insert(id);
    expected.insert(id);
    for (const uint64_t other : {id, id - 1, id + 1, uint64_t{random() % 500}}) {
      EXPECT_EQ(ranges.contains(other), expected.contains(other)) << other;
    }
  }
}

TEST(IdRanges, TakeMemoryForTheirGaps) {
  IdRanges ranges;
  for (uint64_t id = 1; id <= 100'000; ++id) {
    if (id % 10'000 != 0) ranges.insert(id);
  }
  EXPECT_EQ(ranges.num_ranges(), 10u);
  for (uint64_t id = 10'000; id <= 100'000; id += 10'000) ranges.insert(id);
  EXPECT_EQ(ranges.num_ranges(), 1u);
}

TEST(IdRanges, ReachToBothEnds) {
  constexpr uint64_t kLast = std::numeric_limits<uint64_t>::max();
  IdRanges ranges;
  for (const uint64_t id : {uint64_t{0}, kLast, kLast - 1, uint64_t{1}}) ranges.insert(id);
  EXPECT_TRUE(ranges.contains(0) && ranges.contains(1) && ranges.contains(kLast));
  EXPECT_FALSE(ranges.contains(2) || ranges.contains(kLast - 2));
  EXPECT_EQ(ranges.num_ranges(), 2u);
}

}  // namespace
}  // namespace psstore::testing
