// BufferPool: alignment, sharing, reuse within its bound, and lifetime of the pool.
#include "core/buffer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

#include "core/huge_pages.h"
#include "random_floats.h"
#include "table_support.h"

namespace psstore::testing {
namespace {

constexpr size_t kMiB = 1u << 20;

TEST(BufferPool, EverySizeIsAlignedAndWritable) {
  const auto pool = BufferPool::create(kMiB);
  for (const size_t size :
       {0u, 1u, 63u, 64u, 255u, 256u, 257u, 320u, 321u, 4095u, 65536u, 1000003u}) {
    const BufferRef buffer = pool->allocate(size);
    EXPECT_EQ(buffer->size(), size);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data()) % kBufferAlignment, 0u);
    std::memset(buffer->data(), 0xab, size);
  }
}

TEST(BufferPool, MemoryIsAtMostAQuarterMoreThanAskedFor) {
  const auto pool = BufferPool::create(0);
  for (size_t size = 256; size < 100'000; size += 37) {
    const BufferRef buffer = pool->allocate(size);
    EXPECT_GE(pool->bytes_in_use(), size);
    EXPECT_LE(pool->bytes_in_use(), size + size / 4 + 1);
  }
}

std::shared_ptr<MemoryBudget> budget_of(uint64_t max_bytes) {
  return std::make_shared<MemoryBudget>(max_bytes, "this test", "ask for less");
}

TEST(BufferPool, HandsOutNoMoreThanItsBudget) {
  const auto budget = budget_of(4 * kMiB);
  const auto pool = BufferPool::create(8 * kMiB, nullptr, budget);
  BufferRef held = pool->allocate(3 * kMiB);
  EXPECT_EQ(error_of(ErrorCode::OUT_OF_MEMORY, [&] { pool->allocate(2 * kMiB); }),
            "2 MiB for values, rule state or pushes do not fit: this shard may use 4 MiB of this "
            "test, and "
            "1 MiB of that are left; ask for less");
  EXPECT_EQ(budget->taken_bytes(), 3 * kMiB);
  EXPECT_NO_THROW(pool->allocate(kMiB));
  held = {};
  EXPECT_EQ(budget->taken_bytes(), 0U);
}

TEST(BufferPool, GivesIdleMemoryBackRatherThanExceedItsBudget) {
  const auto pool = BufferPool::create(8 * kMiB, nullptr, budget_of(4 * kMiB));
  pool->allocate(3 * kMiB);
  EXPECT_EQ(pool->bytes_idle(), 3 * kMiB);
  const BufferRef other = pool->allocate(2 * kMiB);
  EXPECT_LE(pool->bytes_in_use() + pool->bytes_idle(), 4 * kMiB);
}

TEST(BufferPool, WhatIsReservedIsThereWhateverElseIsTaken) {
  const auto budget = budget_of(4 * kMiB);
  const auto pool = BufferPool::create(0, nullptr, budget);
  budget->take(kMiB);
  const BufferRef others = pool->allocate(3 * kMiB);
  const BufferRef reserved = pool->allocate(kMiB, kMiB);
  EXPECT_EQ(budget->left_bytes(), 0U);
}

TEST(BufferPool, FreedMemoryIsHandedOutAgain) {
  const auto pool = BufferPool::create(kMiB);
  BufferRef first = pool->allocate(5000);
  const std::byte* const data = first->data();
  first = {};
  EXPECT_GT(pool->bytes_idle(), 0u);
  EXPECT_EQ(pool->allocate(4900)->data(), data);
}

TEST(BufferPool, IdleMemoryStaysWithinItsBound) {
  const auto pool = BufferPool::create(kMiB);
  std::vector<BufferRef> buffers;
  for (int i = 0; i < 10; ++i) buffers.push_back(pool->allocate(300'000));
  buffers.clear();
  EXPECT_EQ(pool->bytes_in_use(), 0u);
  EXPECT_GT(pool->bytes_idle(), 0u);
  EXPECT_LE(pool->bytes_idle(), kMiB);
}

TEST(BufferPool, GivesBackWhatNobodyNeededSinceItWasAskedLast) {
  const auto pool = BufferPool::create(64 * kMiB);
  const auto use = [&](size_t count, size_t size) {
    std::vector<BufferRef> buffers;
    for (size_t i = 0; i < count; ++i) buffers.push_back(pool->allocate(size));
  };
  use(10, kMiB);
  pool->free_unused(SIZE_MAX);
  EXPECT_EQ(pool->bytes_idle(), 10 * kMiB);  // all were needed
  use(4, kMiB);
  pool->free_unused(SIZE_MAX);
  EXPECT_EQ(pool->bytes_idle(), 4 * kMiB);
  use(4, kMiB);
  pool->free_unused(SIZE_MAX);
  EXPECT_EQ(pool->bytes_idle(), 4 * kMiB);  // a steady stream keeps what it needs
  pool->free_unused(SIZE_MAX);
  EXPECT_EQ(pool->bytes_idle(), 0u);
}

TEST(BufferPool, KeepsWhatRoundsNeedIfSomebodyGivesBackWhatTheyDoNot) {
  const auto pool = BufferPool::create(kMiB);
  const auto round = [&](size_t num_bytes) {
    std::vector<BufferRef> buffers;
    while (pool->bytes_in_use() < num_bytes) buffers.push_back(pool->allocate(kMiB / 4));
  };
  round(64 * kMiB);
  EXPECT_LE(pool->bytes_idle(), kMiB);
  for (int period = 0; period < 3; ++period) {
    pool->free_unused(0);
    round(64 * kMiB);
    EXPECT_EQ(pool->bytes_idle(), 64 * kMiB);
  }
  pool->free_unused(0);
  pool->free_unused(0);
  const BufferRef first =
      pool->allocate(kMiB / 4);  // nothing was needed since the last call but one
  pool->allocate(3 * kMiB);
  EXPECT_LT(pool->bytes_idle(), 64 * kMiB);
}

TEST(BufferPool, GivesBackAShareOfABurstAtATime) {
  const auto pool = BufferPool::create(64 * kMiB);
  {
    std::vector<BufferRef> burst;
    for (int i = 0; i < 64; ++i) burst.push_back(pool->allocate(kMiB));
  }
  pool->free_unused(1);
  pool->free_unused(1);
  EXPECT_EQ(pool->bytes_idle(), 62 * kMiB);
  for (int i = 0; i < 22; ++i) pool->free_unused(1);
  EXPECT_LT(pool->bytes_idle(), 40 * kMiB);
}

TEST(BufferPool, GivesBackUnusedMemoryOfAllSizesALittleAtATime) {
  const auto pool = BufferPool::create(64 * kMiB);
  for (size_t size = 1000; size <= 8 * kMiB; size *= 2) pool->allocate(size);
  pool->free_unused(SIZE_MAX);
  for (size_t idle = pool->bytes_idle(); idle > 0; idle = pool->bytes_idle()) {
    pool->free_unused(kMiB);
    EXPECT_LT(pool->bytes_idle(), idle);
    EXPECT_TRUE(pool->bytes_idle() + 10 * kMiB >= idle);
  }
}

TEST(BufferPool, ImpossibleSizesAreBadAlloc) {
  const auto pool = BufferPool::create(0);
  EXPECT_THROW(pool->allocate(SIZE_MAX), std::bad_alloc);
  EXPECT_THROW(pool->allocate((size_t{1} << 47) + 1), std::bad_alloc);
  EXPECT_EQ(pool->bytes_in_use(), 0u);
}

TEST(BufferRef, CopiesShareAndTheLastOneFrees) {
  const auto pool = BufferPool::create(0);
  BufferRef first = pool->allocate(100);
  EXPECT_TRUE(first.unique());
  BufferRef second = first;
  EXPECT_EQ(first.get(), second.get());
  EXPECT_FALSE(first.unique());
  first = BufferRef();
  EXPECT_TRUE(second.unique());
  EXPECT_GT(pool->bytes_in_use(), 0u);
  second = BufferRef();
  EXPECT_EQ(pool->bytes_in_use(), 0u);
}

TEST(BufferRef, MovingLeavesNothingBehind) {
  const auto pool = BufferPool::create(0);
  BufferRef first = pool->allocate(100);
  const BufferRef second = std::move(first);
  EXPECT_TRUE(second.unique());
  EXPECT_FALSE(BufferRef().unique());
}

TEST(BufferRef, APartKeepsTheWhole) {
  const auto pool = BufferPool::create(0);
  BufferRef whole = pool->allocate(1000);
  std::byte* const data = whole->data();
  BufferRef part = part_of(std::move(whole), 64, 100);
  EXPECT_EQ(part->data(), data + 64);
  EXPECT_EQ(part->size(), 100u);
  EXPECT_TRUE(part.unique());
  EXPECT_GE(pool->bytes_in_use(), 1000u);
  part = BufferRef();
  EXPECT_EQ(pool->bytes_in_use(), 0u);
}

TEST(BufferRef, APartIsUniqueUnlessSomebodyRefersToTheWholeOrToTheSamePart) {
  BufferRef whole = BufferPool::create(0)->allocate(1000);
  const BufferRef one = part_of(whole, 0, 100);
  BufferRef other = part_of(whole, 100, 100);
  EXPECT_FALSE(one.unique()) << "its bytes are the whole's, too";
  whole = {};
  EXPECT_TRUE(one.unique());
  EXPECT_TRUE(other.unique());
  const BufferRef again = other;
  EXPECT_FALSE(other.unique());
  EXPECT_TRUE(one.unique());
  other = {};
  EXPECT_TRUE(again.unique());
}

TEST(BufferRef, OutlivesThePoolThatMadeIt) {
  BufferRef buffer = BufferPool::create(kMiB)->allocate(1000);
  std::memset(buffer->data(), 1, 1000);
  buffer = BufferRef();
}

TEST(BufferPool, ThreadsShareItAndItsBuffers) {
  const auto pool = BufferPool::create(kMiB);
  const BufferRef shared = pool->allocate(64);
  std::vector<std::thread> threads;
  for (int seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&, seed] {
      for (size_t i = 0; i < 2000; ++i) {
        const BufferRef copy = shared;
        const BufferRef own = pool->allocate((i * 131 + static_cast<size_t>(seed) * 977) % 20'000);
        std::memset(own->data(), seed, own->size());
        EXPECT_TRUE(all_equal<std::byte>({own->data(), own->size()}, static_cast<std::byte>(seed)));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(shared.unique());
}

// ---- huge pages --------------------------------------------------------------------------------------

TEST(HugePages, BlocksAreApartAndThoseOfOneSizeTakeEachOthersPlace) {
  HugePages pages;
  std::vector<std::byte*> blocks;
  for (int i = 0; i < 100; ++i) {
    blocks.push_back(pages.take(16u << 10));
    ASSERT_NE(blocks.back(), nullptr);
    std::memset(blocks.back(), i, 16u << 10);
  }
  for (size_t i = 0; i < blocks.size(); ++i) {
    EXPECT_TRUE(all_equal<std::byte>({blocks[i], 16u << 10}, static_cast<std::byte>(i)));
  }
  pages.give_back(blocks[7], 16u << 10);
  std::byte* const larger = pages.take(100 * kMiB);  // than a region
  ASSERT_NE(larger, nullptr);
  larger[100 * kMiB - 1] = std::byte{1};
  EXPECT_NE(pages.take(20u << 10), blocks[7]);
  EXPECT_EQ(pages.take(16u << 10), blocks[7]);
}

TEST(HugePages, WhatIsGivenBackTakesNoMemory) {
  HugePages pages;
  std::byte* const block = pages.take(kMiB);
  ASSERT_NE(block, nullptr);
  std::memset(block, 1, kMiB);
  pages.give_back(block, kMiB);
  ASSERT_EQ(pages.take(kMiB), block);
  EXPECT_TRUE(all_equal<std::byte>({block, kMiB}, std::byte{0}));  // it came from the system anew
}

}  // namespace
}  // namespace psstore::testing
