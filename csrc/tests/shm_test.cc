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
#include "shm/seen_memory.h"
#include "shm/value_arena.h"
#include "shm/value_view.h"

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

// ---- values that are read where they lie ----------------------------------------------------------

constexpr size_t kBlock = 256 << 10;

// Blocks of a shard's arena, each of one byte; and what a client sees of them.
struct Blocks : Pair {
  std::vector<std::byte*> blocks;

  explicit Blocks(size_t count) {
    for (size_t i = 0; i < count; ++i) {
      blocks.push_back(values->take(kBlock));
      std::memset(blocks.back(), static_cast<int>(i + 1), kBlock);
    }
  }
  SliceEntry at(size_t block, size_t begin = 0, uint32_t num_bytes = kBlock) const {
    return entry_at(*values->offset_of(blocks[block]) + begin, num_bytes);
  }
};

// The first and the last byte of each part.
std::vector<int> ends_of(const ValueView& view, const std::vector<ValueView::Part>& parts) {
  std::vector<int> found;
  for (const auto& [begin, num_bytes] : parts) {
    found.push_back(static_cast<int>(view.data()[begin]));
    found.push_back(static_cast<int>(view.data()[begin + num_bytes - 1]));
  }
  return found;
}

std::vector<ValueView::Part> parts_in_a_row(size_t count) {
  std::vector<ValueView::Part> parts;
  for (size_t i = 0; i < count; ++i) parts.push_back({i * kBlock, kBlock});
  return parts;
}

TEST(ValueView, ShowsWhatLiesApartInOnePieceAndWithoutACopy) {
  const Blocks shard(3);
  const auto parts = parts_in_a_row(3);
  ValueView view(parts);
  view.show(shard.client, std::vector{shard.at(2), shard.at(0), shard.at(1)}, 0);
  EXPECT_EQ(ends_of(view, parts), (std::vector{3, 3, 1, 1, 2, 2}));
  EXPECT_EQ(view.num_mappings(), 2U);  // two of them lie together
  shard.blocks[0][0] = std::byte{9};
  EXPECT_EQ(view.data()[kBlock], std::byte{9});
}

TEST(ValueView, ShowsOtherPlacesWhenValuesHaveMoved) {
  const Blocks shard(4);
  const auto parts = parts_in_a_row(2);
  ValueView view(parts);
  const std::vector here{shard.at(0), shard.at(1)}, there{shard.at(3), shard.at(1)};
  view.show(shard.client, here, 0);
  EXPECT_EQ(view.shown(shard.client, here, 0), 2U);
  EXPECT_EQ(view.shown(shard.client, there, 0), 1U);
  view.show(shard.client, there, 0);
  EXPECT_EQ(ends_of(view, parts), (std::vector{4, 4, 2, 2}));
  const Blocks other(4);  // an arena of its own, with the same offsets
  EXPECT_EQ(view.shown(other.client, there, 0), 0U);
}

// They lie as far apart as they are to be shown, and neither there nor here is what is between them theirs.
TEST(ValueView, LeavesWhatAnotherShardShowsBetweenTwoParts) {
  const Blocks shard(3), other(1);
  const std::vector<ValueView::Part> parts{{0, kBlock}, {2 * kBlock, kBlock}, {kBlock, kBlock}};
  ValueView view(parts);
  other.blocks[0][0] = other.blocks[0][kBlock - 1] = std::byte{7};
  view.show(other.client, std::vector{other.at(0)}, 2);
  view.show(shard.client, std::vector{shard.at(0), shard.at(2)}, 0);
  EXPECT_EQ(ends_of(view, parts), (std::vector{1, 1, 3, 3, 7, 7}));
  EXPECT_EQ(view.num_mappings(), 3U);
}

TEST(ValueView, CopiesWhatIsNoWholePages) {
  const Blocks shard(2);
  const std::vector<ValueView::Part> parts{{0, 100}, {4096, 5000}, {4096 + 5000, 10}};
  ValueView view(parts);
  view.show(shard.client,
            std::vector{shard.at(0, 64, 100), shard.at(1, 0, 5000), shard.at(0, 0, 10)}, 0);
  EXPECT_EQ(ends_of(view, parts), (std::vector{1, 1, 2, 2, 1, 1}));
  EXPECT_EQ(view.num_mappings(), 0U);  // where the second ends the third begins, in the same page
  EXPECT_EQ(view.num_bytes(), 4096U + 5010U);
}

TEST(ValueView, TakesPartsInAnyOrderAndLetsWhatDidNotComeBe) {
  const Blocks shard(2);
  const std::vector<ValueView::Part> parts{{kBlock, kBlock}, {0, kBlock}};
  ValueView view(parts);
  view.show(shard.client, std::vector{shard.at(0)}, 1);
  view.show(shard.client, std::vector{entry_at(0, 0), shard.at(1)}, 0);
  EXPECT_EQ(ends_of(view, parts), (std::vector{0, 0, 2, 2}));
}

TEST(ValueView, HasMemoryOfItsOwnForWhatIsReceived) {
  const Blocks shard(2);
  const auto parts = parts_in_a_row(2);
  ValueView view(parts);
  view.show(shard.client, std::vector{shard.at(0), shard.at(1)}, 0);
  const std::span<std::byte> own = view.own(1, 1)[0];
  std::memset(own.data(), 7, own.size());
  EXPECT_EQ(ends_of(view, parts), (std::vector{1, 1, 7, 7}));
  EXPECT_EQ(shard.blocks[1][0], std::byte{2});
  view.show(shard.client, std::vector{shard.at(1)}, 1);
  EXPECT_EQ(ends_of(view, parts), (std::vector{1, 1, 2, 2}));
}

TEST(ValueView, RefusesWhatLiesElsewhereOrIsOfAnotherSizeAndShowsNothing) {
  const Blocks shard(2);
  const auto parts = parts_in_a_row(2);
  ValueView view(parts);
  for (const SliceEntry& wrong : {entry_at(16 * kMiB - 4096, kBlock),
                                  entry_at(~uint64_t{0} - 1, kBlock), shard.at(1, 0, 3)}) {
    EXPECT_TRUE(refused([&] { view.show(shard.client, std::vector{shard.at(0), wrong}, 0); }));
  }
  EXPECT_TRUE(refused([&] { view.show(shard.client, std::vector{shard.at(0), shard.at(1)}, 1); }));
  EXPECT_EQ(ends_of(view, parts), (std::vector{0, 0, 0, 0}));
  EXPECT_THROW(view.own(1, 2), std::invalid_argument);
  EXPECT_THROW(ValueView({{0, 8}, {4, 8}}), std::invalid_argument);
  EXPECT_THROW(ValueView({{~size_t{0} - 4, 8}}), std::invalid_argument);
}

TEST(ValueView, StaysReadableWhenTheShardAndTheConnectionAreGone) {
  const auto parts = parts_in_a_row(2);
  ValueView view(parts);
  {
    const Blocks shard(2);
    view.show(shard.client, std::vector{shard.at(0), shard.at(1)}, 0);
  }
  EXPECT_EQ(ends_of(view, parts), (std::vector{1, 1, 2, 2}));
}

TEST(ValueView, CopiesWhenThereAreTooManyMappings) {
  constexpr size_t kPage = 4096, kCount = 8300;
  const auto arena = std::make_shared<ValueArena>(2 * kCount * kPage);
  const auto pushes = PushArena::create(kPushBlockBytes);
  const ClientMemory client(arena->readonly_file().get(), pushes->file().get(),
                            pushes->control_file().get());
  std::byte* const block = arena->take(2 * kCount * kPage);
  std::vector<ValueView::Part> parts;
  std::vector<SliceEntry> entries;
  for (size_t i = 0; i < kCount; ++i) {  // each second page
    block[2 * i * kPage] = static_cast<std::byte>(i);
    parts.push_back({i * kPage, kPage});
    entries.push_back(entry_at(2 * i * kPage, kPage));
  }
  ValueView view(parts);
  view.show(client, entries, 0);
  EXPECT_EQ(view.num_mappings(), 8192U);
  for (size_t i = 0; i < kCount; ++i) ASSERT_EQ(view.data()[i * kPage], static_cast<std::byte>(i));
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

// ---- what standbys see ----------------------------------------------------------------------------

TEST(SeenMemory, ShowsAStandbyTheSameAndTellsWhatIsNeededNoMore) {
  constexpr uint64_t kAddress = uint64_t{3} << 36;
  Pair pair;
  pair.pushes->seal();
  const std::shared_ptr<SeenMemory> seen = SeenMemory::map(pair.pushes->file().get(), kAddress);
  std::vector<std::byte> bytes(kPushBlockBytes, std::byte{5});
  const uint64_t first = *pair.write(bytes, 1);
  const uint64_t second = *pair.write(bytes, 2);
  const auto range_at = [&](uint64_t begin, uint64_t number) {
    return seen->range_of(std::vector{entry_at(kAddress + begin, kPushBlockBytes)}, number);
  };
  BufferRef one = range_at(first, 10);
  BufferRef other = range_at(second, 11);
  EXPECT_EQ(std::memcmp(other->data(), bytes.data(), bytes.size()), 0);
  EXPECT_TRUE(seen->take_released().empty());
  other = {};
  EXPECT_EQ(seen->take_released(), std::vector<uint64_t>{11});
  seen->close();
  EXPECT_FALSE(seen->is_over());
  one = {};
  EXPECT_FALSE(seen->is_over());
  EXPECT_EQ(seen->take_released(), std::vector<uint64_t>{10});
  EXPECT_TRUE(seen->is_over());
  EXPECT_TRUE(refused([&] { (void)range_at(0 - kAddress, 12); })) << "the client's own offsets";
}

}  // namespace
}  // namespace psstore::testing
