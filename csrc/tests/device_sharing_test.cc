// Memory of a device between two processes: here two devices, each with an order of its own, of which one has
// imported what is the other's.
#include "device/device_arena.h"
#include "shm/borrowed_device.h"
#include "table_support.h"

namespace psstore::testing {
namespace {

using device::Device;
using device::DeviceArena;
using device::SharedBlock;

constexpr size_t kMiB = 1u << 20;

std::shared_ptr<Device> open(uint64_t seed, size_t num_bytes = 64 * kMiB) {
  return device::open_device("fake:0?seed=" + std::to_string(seed) +
                             "&bytes=" + std::to_string(num_bytes));
}

// ---- the arena --------------------------------------------------------------------------------------

TEST(DeviceArena, RangesShareFewBlocksAndTakeEachOthersPlace) {
  DeviceArena arena(open(0));
  std::vector<std::byte*> ranges;
  for (int i = 0; i < 32; ++i) ranges.push_back(arena.take(64 << 10));
  EXPECT_EQ(arena.blocks_after(0).size(), 1u);
  const uint64_t first = *arena.offset_of(ranges[0]);
  for (std::byte* range : ranges) arena.give_back(range, 64 << 10);
  std::byte* const whole = arena.take(2 * kMiB);
  EXPECT_EQ(arena.offset_of(whole), first);
  EXPECT_EQ(arena.blocks_after(0).size(), 1u);
  arena.give_back(whole, 2 * kMiB);
}

TEST(DeviceArena, NamesWhatItHoldsAndNothingElse) {
  DeviceArena arena(open(0));
  std::byte* const range = arena.take(3 * kMiB);
  std::byte* const other = arena.take(9 * kMiB);  // in a block of its own
  EXPECT_EQ(*arena.offset_of(range + 5), *arena.offset_of(range) + 5);
  EXPECT_GE(*arena.offset_of(other), *arena.offset_of(range) + 3 * kMiB);
  std::byte elsewhere{};
  EXPECT_FALSE(arena.offset_of(&elsewhere));
  const auto blocks = arena.blocks_after(0);
  ASSERT_EQ(blocks.size(), 2u);
  EXPECT_EQ(arena.blocks_after(blocks[0]->number()), std::vector{blocks[1]});
}

TEST(DeviceArena, GivesBackEmptyBlocksThatNobodyWasToldOf) {
  const auto device = open(0);
  const size_t before = device->memory().free_bytes;
  DeviceArena arena(device);
  std::byte* const range = arena.take(4 * kMiB);
  std::vector<std::shared_ptr<SharedBlock>> told = arena.blocks_after(0);
  arena.give_back(range, 4 * kMiB);
  arena.trim();
  EXPECT_LT(device->memory().free_bytes, before);
  told.clear();
  arena.trim();
  EXPECT_EQ(device->memory().free_bytes, before);
  EXPECT_NE(arena.take(4 * kMiB), nullptr);
}

TEST(DeviceArena, MakesDoWithWhatADeviceHasLeft) {
  DeviceArena arena(open(0, kMiB));
  EXPECT_NE(arena.take(300 << 10), nullptr);
  EXPECT_NE(arena.take(300 << 10), nullptr);
  EXPECT_EQ(arena.take(600 << 10), nullptr);
}

// ---- both sides -------------------------------------------------------------------------------------

class DeviceSharing : public ::testing::TestWithParam<uint64_t> {
 protected:
  static constexpr size_t kFrameBytes = 3 * kPushBlockBytes / 2;

  DeviceSharing() {
    const auto [block] = std::array{arena_->blocks_after(0)};
    blocks_->add_block(block[0]->address(), block[0]->num_bytes(), block[0]->handle());
  }

  // The client's array, full of `value`.
  DeviceRange array(device::Queue& queue, float value) {
    const Floats floats(kFrameBytes / sizeof(float), value);
    auto* const pinned = client_->allocate_pinned(kFrameBytes);
    std::memcpy(pinned, floats.data(), kFrameBytes);
    auto* const data = client_->allocate(kFrameBytes);
    queue.copy_in(data, pinned, kFrameBytes);
    pinned_.push_back(pinned);
    return {data, kFrameBytes};
  }
  Floats read(Device& device, const void* data) {
    const auto queue = device.make_queue();
    auto* const pinned = device.allocate_pinned(kFrameBytes);
    queue->copy_out(pinned, data, kFrameBytes);
    queue->record()->wait();
    Floats values(kFrameBytes / sizeof(float));
    std::memcpy(values.data(), pinned, kFrameBytes);
    device.free_pinned(pinned);
    return values;
  }
  static SliceEntry entry_at(uint64_t offset) {
    return {.key = 1, .num_bytes = kFrameBytes, .offset = offset};
  }
  ~DeviceSharing() override {
    for (std::byte* memory : pinned_) client_->free_pinned(memory);
  }

  const std::shared_ptr<Device> shard_ = open(GetParam());
  const std::shared_ptr<Device> client_ = open(GetParam() + 100);
  const std::shared_ptr<DeviceArena> arena_ = std::make_shared<DeviceArena>(shard_);
  const std::shared_ptr<BufferPool> pool_ = BufferPool::create_over(SIZE_MAX, arena_, false);
  const std::shared_ptr<PushArena> pushes_ =
      PushArena::create_over(pool_->allocate(4 * kPushBlockBytes), 0);
  const std::shared_ptr<BorrowedDevice> blocks_ = std::make_shared<BorrowedDevice>(client_);
  std::vector<std::byte*> pinned_;

  std::shared_ptr<DevicePushes> rooms() {
    // The arena is the only thing there.
    return std::make_shared<DevicePushes>(blocks_, pushes_->control_file().get(), 0,
                                          pushes_->num_bytes());
  }
};

TEST_P(DeviceSharing, TheShardHasWhatTheClientWroteAndSaysWhenItIsDone) {
  const auto rooms = this->rooms();
  const auto queue = client_->make_queue();
  auto first = rooms->take(kFrameBytes);
  auto second = rooms->take(kFrameBytes);
  ASSERT_TRUE(first && second);
  EXPECT_EQ(rooms->take(1), nullptr);
  first->write(*queue, std::array{array(*queue, 1)});
  second->write(*queue, std::array{array(*queue, 2)});
  queue->record()->wait();
  EXPECT_EQ(first->send(7), 0u);
  {
    const std::vector<SliceEntry> entries{entry_at(second->send(8))};
    const BufferRef payload = pushes_->range_of(entries, 8);
    EXPECT_EQ(read(*shard_, payload->data())[0], 2);
    EXPECT_EQ(rooms->take(1), nullptr);
  }
  EXPECT_NE(rooms->take(kFrameBytes), nullptr);
}

TEST_P(DeviceSharing, RoomThatWasNotSentIsFreeAgain) {
  const auto rooms = this->rooms();
  for (int i = 0; i < 3; ++i) EXPECT_NE(rooms->take(4 * kPushBlockBytes), nullptr);
}

TEST_P(DeviceSharing, AnArenaIsLetGoOnceItsClientHasUnmappedIt) {
  auto rooms = this->rooms();
  auto room = rooms->take(kFrameBytes);
  rooms = nullptr;
  EXPECT_FALSE(pushes_->is_let_go());
  room = nullptr;
  EXPECT_TRUE(pushes_->is_let_go());
}

TEST_P(DeviceSharing, TheClientReadsValuesWhereTheyLie) {
  const BufferRef value = pool_->allocate(kFrameBytes);
  const auto theirs = shard_->make_queue();
  auto* const pinned = shard_->allocate_pinned(kFrameBytes);
  std::memset(pinned, 0x40, kFrameBytes);
  theirs->copy_in(value->data(), pinned, kFrameBytes);
  theirs->record()->wait();
  shard_->free_pinned(pinned);
  const auto queue = client_->make_queue();
  const std::vector<SliceEntry> entries{entry_at(*arena_->offset_of(value->data()))};
  const DeviceRange out = array(*queue, 0);
  blocks_->read(*queue, entries, std::array{out});
  queue->record()->wait();
  uint32_t bits = 0;
  const Floats got = read(*client_, out.data);
  std::memcpy(&bits, &got.back(), sizeof(bits));
  EXPECT_EQ(bits, 0x40404040u);
}

TEST_P(DeviceSharing, WhatLiesNowhereOrHasAnotherSizeIsRefused) {
  const auto queue = client_->make_queue();
  const DeviceRange out = array(*queue, 0);
  const std::vector<SliceEntry> beyond{entry_at(uint64_t{1} << 40)};
  error_of(ErrorCode::BAD_HEADER, [&] { blocks_->read(*queue, beyond, std::array{out}); });
  const std::vector<SliceEntry> whole{entry_at(0)};
  const std::array shorter{DeviceRange{out.data, kFrameBytes - 4}};
  error_of(ErrorCode::BAD_HEADER, [&] { blocks_->read(*queue, whole, shorter); });
  std::vector<SliceEntry> encoded{entry_at(0)};
  encoded[0].dtype = DType::kInt8;
  error_of(ErrorCode::BAD_HEADER, [&] { pushes_->range_of(encoded, 1); });
  error_of(ErrorCode::BAD_ARGUMENT, [&] { blocks_->add_block(1, 1, "0 4096 /proc/0/fd/0"); });
}

INSTANTIATE_TEST_SUITE_P(Orders, DeviceSharing, ::testing::Range<uint64_t>(0, 8));

}  // namespace
}  // namespace psstore::testing
