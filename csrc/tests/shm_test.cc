// Shared memory: what lies where, what is refused, and when memory is free again. Both sides are in this
// process, each with its own mapping.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <vector>

#include "core/buffer.h"
#include "shm/client_memory.h"
#include "shm/push_arena.h"
#include "shm/value_arena.h"

namespace psstore::testing {
namespace {

constexpr size_t kMiB = 1u << 20;

SliceEntry entry_at(uint64_t offset, uint32_t num_bytes) {
  return {.key = 1, .num_bytes = num_bytes, .offset = offset};
}

// A shard's arenas and a client that has mapped them.
struct Pair {
  std::shared_ptr<ValueArena> values = std::make_shared<ValueArena>(16 * kMiB);
  std::shared_ptr<PushArena> pushes = PushArena::create(4 * kPushBlockBytes);
  ClientMemory client{values->readonly_file().get(), pushes->file().get(),
                      pushes->control_file().get()};

  std::optional<uint64_t> write(std::vector<std::byte>& bytes, uint64_t number) {
    const std::vector<std::span<std::byte>> ranges{bytes};
    return client.write(ranges, number);
  }
};

bool refused(const std::function<void()>& call, ErrorCode code = ErrorCode::BAD_HEADER) {
  try {
    call();
  } catch (const Error& error) {
    return error.code() == code;
  }
  return false;
}

// ---- the value arena ------------------------------------------------------------------------------

TEST(ValueArena, LargeBuffersOfAPoolLieInItAndSmallOnesDoNot) {
  const auto arena = std::make_shared<ValueArena>(16 * kMiB);
  const auto pool = BufferPool::create(0, arena);
  EXPECT_TRUE(arena->offset_of(pool->allocate(kLargeBlockBytes)->data()));
  EXPECT_FALSE(arena->offset_of(pool->allocate(1000)->data()));
}

TEST(ValueArena, WhatDoesNotFitComesFromTheHeap) {
  const auto arena = std::make_shared<ValueArena>(2 * kMiB);
  const auto pool = BufferPool::create(0, arena);
  const BufferRef first = pool->allocate(2 * kMiB);
  const BufferRef second = pool->allocate(kMiB);
  EXPECT_TRUE(arena->offset_of(first->data()));
  EXPECT_FALSE(arena->offset_of(second->data()));
  std::memset(second->data(), 1, kMiB);
}

TEST(ValueArena, MemoryThatWasGivenBackIsTakenAgainAndIsZero) {
  const auto arena = std::make_shared<ValueArena>(2 * kMiB);
  std::byte* const first = arena->take(2 * kMiB);
  std::memset(first, 0xff, 2 * kMiB);
  arena->give_back(first, 2 * kMiB);
  std::byte* const second = arena->take(2 * kMiB);
  EXPECT_EQ(second, first);
  EXPECT_EQ(second[kMiB], std::byte{0});
}

TEST(ValueArena, ItsFileCannotBeMappedForWriting) {
  const ValueArena arena(kMiB);
  const int fd = arena.readonly_file().get();
  EXPECT_EQ(mmap(nullptr, kMiB, PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
}

// ---- pulls ----------------------------------------------------------------------------------------

TEST(ClientMemory, ReadsWhatTheShardWrote) {
  Pair pair;
  std::byte* const block = pair.values->take(kMiB);
  std::memset(block, 7, kMiB);
  const std::vector<SliceEntry> entries{entry_at(*pair.values->offset_of(block) + 10, 3),
                                        entry_at(0, 0)};
  std::vector<std::byte> out(3), untouched(5);
  pair.client.read(entries, std::vector<std::span<std::byte>>{out, untouched});
  EXPECT_EQ(out, std::vector<std::byte>(3, std::byte{7}));
  EXPECT_EQ(untouched, std::vector<std::byte>(5));
}

TEST(ClientMemory, RefusesWhatLiesElsewhereOrIsOfAnotherSizeAndCopiesNothing) {
  Pair pair;
  std::byte* const block = pair.values->take(kMiB);
  std::memset(block, 7, kMiB);
  std::vector<std::byte> good(4), bad(4);
  const std::vector<std::span<std::byte>> ranges{good, bad};
  for (const SliceEntry& wrong :
       {entry_at(16 * kMiB - 3, 4), entry_at(~uint64_t{0} - 1, 4), entry_at(0, 3)}) {
    EXPECT_TRUE(refused([&] { pair.client.read(std::vector{entry_at(0, 4), wrong}, ranges); }));
  }
  EXPECT_TRUE(refused([&] { pair.client.read(std::vector{entry_at(0, 4)}, ranges); }));
  EXPECT_EQ(good, std::vector<std::byte>(4));
}

// ---- pushes ---------------------------------------------------------------------------------------

TEST(PushArena, ShowsTheShardWhatTheClientWrote) {
  Pair pair;
  std::vector<std::byte> bytes(kPushBlockBytes + 1, std::byte{9});
  const std::optional<uint64_t> begin = pair.write(bytes, 1);
  ASSERT_TRUE(begin);
  const BufferRef payload =
      pair.pushes->range_of(std::vector{entry_at(*begin, 1), entry_at(*begin + 1, 65536)}, 1);
  ASSERT_EQ(payload->size(), bytes.size());
  EXPECT_EQ(std::memcmp(payload->data(), bytes.data(), bytes.size()), 0);
}

TEST(PushArena, BlocksAreFreeAgainWhenTheShardNeedsThemNoMore) {
  Pair pair;
  std::vector<std::byte> bytes(2 * kPushBlockBytes);
  const uint64_t first = *pair.write(bytes, 1);
  const uint64_t second = *pair.write(bytes, 2);
  EXPECT_FALSE(pair.write(bytes, 3));  // both are under way
  BufferRef payload = pair.pushes->range_of(std::vector{entry_at(second, 2 * kPushBlockBytes)}, 2);
  const BufferRef shared = payload;
  payload = {};
  EXPECT_FALSE(pair.write(bytes, 3));
  (void)pair.pushes->range_of(std::vector{entry_at(first, 2 * kPushBlockBytes)}, 1);
  EXPECT_EQ(pair.write(bytes, 3), first);
}

TEST(PushArena, RefusesPayloadsThatLieWhereNoneMay) {
  Pair pair;
  constexpr uint64_t kEnd = 4 * kPushBlockBytes;
  const std::vector<std::vector<SliceEntry>> wrong{
      {},
      {entry_at(0, 0)},
      {entry_at(64, 4)},    // within a block
      {entry_at(kEnd, 4)},  // beyond the end
      {entry_at(3 * kPushBlockBytes, 2 * kPushBlockBytes)},
      {entry_at(~uint64_t{0xffff}, 1u << 31), entry_at(0, 4)},
      {entry_at(0, 4), entry_at(8, 4)},  // not one after the other
      {entry_at(0, 4), entry_at(0, 4)},
  };
  for (const auto& entries : wrong) {
    EXPECT_TRUE(refused([&] { (void)pair.pushes->range_of(entries, 1); }));
  }
  SliceEntry indices = entry_at(0, 8);
  indices.dtype = DType::kTopK;
  EXPECT_TRUE(refused([&] { (void)pair.pushes->range_of(std::vector{indices}, 1); }));
}

TEST(PushArena, OutlivesItsConnectionWhileAContributionRefersToIt) {
  BufferRef payload;
  {
    Pair pair;
    std::vector<std::byte> bytes(kPushBlockBytes, std::byte{5});
    const uint64_t begin = *pair.write(bytes, 1);
    payload = pair.pushes->range_of(std::vector{entry_at(begin, kPushBlockBytes)}, 1);
  }
  EXPECT_EQ(payload->data()[kPushBlockBytes - 1], std::byte{5});
}

TEST(PushArena, OnceSealedNobodyCanPunchHolesOrMapItForWriting) {
  Pair pair;
  pair.pushes->seal();
  const int fd = pair.pushes->file().get();
  EXPECT_NE(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, kPushBlockBytes), 0);
  EXPECT_NE(ftruncate(fd, 0), 0);
  EXPECT_EQ(mmap(nullptr, kPushBlockBytes, PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
  std::vector<std::byte> bytes(kPushBlockBytes);
  EXPECT_TRUE(pair.write(bytes, 1));  // through the mapping that it has
}

}  // namespace
}  // namespace psstore::testing
