// Who becomes a row and which rows go, where that takes more decisions than a test of a store has: the whole of it is held to
// a model in tests/client/test_row_bounds.py.
#include <gtest/gtest.h>

#include <vector>

#include "rows/admission.h"
#include "rows/eviction.h"

namespace psstore {
namespace {

TEST(LeastFrequent, halves_its_counts_and_then_goes_by_age) {
  const auto lfu = Eviction::make({.max_rows = 1, .eviction = EvictionKind::kLeastFrequent});
  uint32_t often = 0;
  for (uint64_t decision = 1; decision <= 1000; ++decision) often = lfu->used(often, decision);
  const uint32_t twice = lfu->used(lfu->used(0, 3000), 3001);
  EXPECT_GT(lfu->worth(often, 3001), lfu->worth(twice, 3001));  // 255 halved twice, and 2
  EXPECT_LT(lfu->worth(often, 9000), lfu->worth(twice, 9000));  // both are 0: the older one goes
  EXPECT_EQ(lfu->used(often, 1024 * 20) >> 24, 1u);             // all of it is forgotten
  EXPECT_EQ(lfu->due(often, 1 << 30), Eviction::kNever);
}

TEST(TimeToLive, ends_a_sixteenth_late) {
  const auto ttl = Eviction::make({.eviction = EvictionKind::kTimeToLive, .time_to_live = 160});
  const uint32_t usage = ttl->used(0, 1000);
  EXPECT_EQ(ttl->due(usage, 1000), 1170u);
  EXPECT_EQ(ttl->due(usage, 1169), 1170u);
  EXPECT_EQ(ttl->due(usage, 1500), 1500u);
  EXPECT_EQ(ttl->grace(), 10u);
}

TEST(LeastRecent, orders_by_age_also_where_its_numbers_begin_anew) {
  const auto lru = Eviction::make({.max_rows = 1, .eviction = EvictionKind::kLeastRecent});
  const uint64_t end = uint64_t{1} << 32;
  EXPECT_LT(lru->worth(lru->used(0, end - 5), end + 9), lru->worth(lru->used(0, end + 5), end + 9));
}

TEST(Admission, after_contributions_forgets_what_is_rare) {
  const RowBounds bounds{.max_rows = 1024, .admission = AdmissionKind::kAfter, .admit_after = 3};
  const auto admission = Admission::make(bounds, 7);
  std::vector<std::byte> counted(admission->counted_bytes());
  EXPECT_FALSE(admission->admits(5, 2, 1, nullptr));
  EXPECT_TRUE(admission->admits(5, 3, 1, nullptr));
  admission->count(5, 2, counted.data());
  EXPECT_TRUE(admission->admits(5, 1, 1, counted.data()));
  for (uint64_t id = 100; id < 100 + 4 * 1024 - 1; ++id)
    admission->count(id % 300 + 100, 1, counted.data());
  EXPECT_FALSE(admission->admits(5, 1, 1, counted.data()));
}

TEST(Admission, by_probability_is_as_likely_as_it_says_and_by_decision) {
  const RowBounds bounds{.admission = AdmissionKind::kProbability, .admit_probability = 0.25};
  const auto admission = Admission::make(bounds, 7);
  int num_admitted = 0;
  int num_both = 0;
  for (uint64_t id = 0; id < 10'000; ++id) {
    const bool first = admission->admits(id, 1, 1, nullptr);
    num_admitted += first;
    num_both += first && admission->admits(id, 1, 2, nullptr);
  }
  EXPECT_NEAR(num_admitted, 2500, 150);
  EXPECT_NEAR(num_both, 625, 100);
}

}  // namespace
}  // namespace psstore
