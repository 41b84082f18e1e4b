// What readers of a slot are sent: from any version that they can have, what makes it the newest one; and how much is kept.
#include "table/change_log.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

#include "changes/changes.h"
#include "table_support.h"

namespace psstore::testing {
namespace {

using Bits = std::vector<uint16_t>;

constexpr uint64_t kLoggedElems = 3000;
constexpr uint64_t kImageBytes = kLoggedElems * sizeof(uint16_t);

class ChangeLogTest : public ::testing::Test {
 protected:
  static std::shared_ptr<MemoryBudget> budget_of(uint64_t num_bytes) {
    return std::make_shared<MemoryBudget>(num_bytes, "memory", "take less");
  }

  // A new value, of which one in `every` elements is another number.
  void change(size_t every) {
    for (float& element : value_) {
      if (random_() % every == 0) element = static_cast<float>(random_());
    }
    ++version_;
  }

  Bits whole() {
    Bits bits(kLoggedElems);
    backend_->convert(DType::kFloat32, DType::kBFloat16, value_.data(), bits.data(), kLoggedElems);
    return bits;
  }

  Finding find(uint64_t wanted_version) {
    const BufferRef value = buffer_of(*pool_, value_);
    return log_.find(value, version_, DType::kFloat32, wanted_version, *backend_);
  }

  static Bits of(const Finding& found, Bits has) {
    if (!found.is_changes) return elements_of<uint16_t>(found.value->data(), kImageBytes);
    const std::span<const std::byte> payload(found.value->data(), found.num_bytes);
    EXPECT_TRUE(are_changes(sizeof(uint16_t), payload, kLoggedElems));
    apply_changes(sizeof(uint16_t), payload, reinterpret_cast<std::byte*>(has.data()));
    return has;
  }

  std::mt19937 random_{7};
  std::shared_ptr<BufferPool> pool_ = make_pool();
  std::shared_ptr<Backend> backend_ = make_backend("cpu");
  std::shared_ptr<MemoryBudget> budget_ = budget_of(1 << 20);
  ChangeLog log_{DType::kBFloat16, kLoggedElems, budget_};
  Floats value_ = Floats(kLoggedElems);
  uint64_t version_ = 0;
};

TEST_F(ChangeLogTest, TheFirstReaderGetsTheWholeAndTheNextOnesWhatHasChanged) {
  const Bits first = of(find(0), {});
  EXPECT_EQ(first, whole());
  change(50);
  const Finding found = find(1);
  ASSERT_TRUE(found.is_changes);
  EXPECT_LT(found.num_bytes, kImageBytes / 5);
  EXPECT_EQ(of(found, first), whole());
  EXPECT_EQ(find(1).value.get(), found.value.get()) << "made once, sent to all";
  EXPECT_FALSE(find(0).is_changes) << "who has nothing";
}

TEST_F(ChangeLogTest, AnyReaderComesToTheNewestVersionFromAnyOther) {
  std::map<uint64_t, Bits> had;
  size_t num_changes = 0;
  for (int round = 0; round < 3000; ++round) {
    if (random_() % 3 != 0) change(1 + random_() % 100);
    const uint64_t has =
        had.empty() || random_() % 5 == 0 ? random_() % (version_ + 1) : had.rbegin()->first;
    if (has == version_) continue;
    const auto known = had.find(has);
    const Finding found = find(known == had.end() ? 0 : has + 1);
    num_changes += found.is_changes ? 1 : 0;
    const Bits now = of(found, known == had.end() ? Bits{} : known->second);
    ASSERT_EQ(now, whole());
    had[version_] = now;
    if (had.size() > 12) had.erase(had.begin());
    EXPECT_LE(log_.num_bytes(), 2 * kImageBytes);
  }
  EXPECT_GT(num_changes, 500U);
}

TEST_F(ChangeLogTest, AVersionThatNobodyAskedForIsNoneToBeginAt) {
  find(0);
  change(50);
  change(50);
  find(1);
  EXPECT_FALSE(find(2).is_changes);
  EXPECT_TRUE(find(1).is_changes);
}

TEST_F(ChangeLogTest, ASnapshotOfAnOlderVersionIsToldOfThatOne) {
  Bits first = of(find(0), {});
  const Floats older = value_;
  std::vector<std::pair<uint64_t, Floats>> versions = {{0, older}};
  for (int i = 0; i < 3; ++i) {
    change(40);
    find(version_);
    versions.emplace_back(version_, value_);
  }
  for (const auto& [version, value] : versions) {
    if (version == 0) continue;
    const BufferRef then = buffer_of(*pool_, value);
    const Finding found = log_.find(then, version, DType::kFloat32, 1, *backend_);
    ASSERT_TRUE(found.is_changes);
    Bits expected(kLoggedElems);
    backend_->convert(DType::kFloat32, DType::kBFloat16, value.data(), expected.data(),
                      kLoggedElems);
    EXPECT_EQ(of(found, first), expected);
  }
}

TEST_F(ChangeLogTest, WhatChangesAltogetherIsSentWhole) {
  find(0);
  change(1);
  EXPECT_FALSE(find(1).is_changes);
}

TEST_F(ChangeLogTest, WhatGoesThereAndBackIsToldToWhoHasWhatWasBetween) {
  find(0);
  const Floats first = value_;
  change(30);
  const Bits between = of(find(1), Bits(kLoggedElems));
  value_ = first;
  ++version_;
  EXPECT_EQ(of(find(1), Bits(kLoggedElems)), whole());
  const Finding found = find(2);
  ASSERT_TRUE(found.is_changes);
  EXPECT_EQ(of(found, between), whole());
}

TEST_F(ChangeLogTest, WhatChangesInNoBitIsSaidInNoByte) {
  find(0);
  ++version_;
  const Finding found = find(1);
  ASSERT_TRUE(found.is_changes);
  EXPECT_EQ(found.num_bytes, 0U);
}

TEST_F(ChangeLogTest, KeepsWithinItsBudgetAndGivesItBack) {
  {
    const ChangeLog other(DType::kFloat32, 100, budget_);
    EXPECT_EQ(budget_->taken_bytes(), 2 * kImageBytes + 800);
  }
  EXPECT_EQ(budget_->taken_bytes(), 2 * kImageBytes);
  EXPECT_THROW(ChangeLog(DType::kBFloat16, kLoggedElems, budget_of(2 * kImageBytes - 1)), Error);
}

}  // namespace
}  // namespace psstore::testing
