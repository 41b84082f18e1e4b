// Runs the fuzz target on seeded programs, so that the sanitizers see it without libFuzzer too; and that it would notice
// what standbys are not told.
#include <gtest/gtest.h>

#include <stdexcept>

#include "core/breakable_rules.h"
#include "fuzz_targets.h"
#include "wire_support.h"

namespace psstore::testing {
namespace {

constexpr uint32_t kNumPrograms = 25;

Bytes program_of(uint32_t seed) {
  return random_bytes(3000, seed);
}

TEST(ReplicationFuzz, AStandbyHasWhatItsShardHas) {
  for (uint32_t seed = 0; seed < kNumPrograms; ++seed) {
    EXPECT_NO_THROW(fuzz_replication(program_of(seed))) << "seed " << seed;
  }
}

class BrokenReplicationFuzz : public ::testing::TestWithParam<BreakableRule> {
 protected:
  BrokenReplicationFuzz() { broken_rules = uint64_t{1} << static_cast<uint32_t>(GetParam()); }
  ~BrokenReplicationFuzz() override { broken_rules = 0; }
};

TEST_P(BrokenReplicationFuzz, IsNoticed) {
  const auto run_all = [] {
    for (uint32_t seed = 0; seed < kNumPrograms; ++seed) fuzz_replication(program_of(seed));
  };
  EXPECT_THROW(run_all(), std::exception);
}

INSTANTIATE_TEST_SUITE_P(Rules, BrokenReplicationFuzz,
                         ::testing::Values(BreakableRule::kWRITES_ARE_RECORDED,
                                           BreakableRule::kSCALES_ARE_RECORDED,
                                           BreakableRule::kROWS_ARE_RECORDED,
                                           BreakableRule::kWHAT_IS_STAGED_IS_FILLED_IN,
                                           BreakableRule::kREFUSALS_ARE_FILLED_IN,
                                           BreakableRule::kCOUNTS_ARE_FILLED_IN));

}  // namespace
}  // namespace psstore::testing
