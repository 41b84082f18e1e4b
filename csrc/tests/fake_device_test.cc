// The fake device by itself: what is missing shows, what is right comes out right whatever the order.
#include "device/fake_device.h"

#include <cstring>

#include "table_support.h"

namespace psstore::device {
namespace {

using psstore::testing::error_of;
using psstore::testing::Floats;

constexpr uint64_t kSeeds = 32;

// Device memory and its bytes on the host.
struct Block {
  std::byte* device;
  std::byte* pinned;
};

class FakeDeviceTest : public ::testing::Test {
 protected:
  static std::shared_ptr<Device> open(uint64_t seed) {
    return open_device("fake:0?seed=" + std::to_string(seed));
  }
  static Block block(Device& device) { return {device.allocate(8), device.allocate_pinned(8)}; }
  static void write(const Block& block, const Floats& values) {
    std::memcpy(block.pinned, values.data(), 8);
  }
  static Floats read(const Block& block) {
    Floats values(2);
    std::memcpy(values.data(), block.pinned, 8);
    return values;
  }
  static void release(Device& device, const Block& block) {
    device.free(block.device);
    device.free_pinned(block.pinned);
  }

  // In by one queue, out by another, which waits or does not.
  static Floats round_trip(uint64_t seed, bool waits) {
    const auto device = open(seed);
    const auto in = device->make_queue();
    const auto out = device->make_queue();
    const Block sent = block(*device);
    const Block received = block(*device);
    write(sent, {1, 2});
    in->copy_in(sent.device, sent.pinned, 8);
    if (waits) out->wait_for(in->record());
    out->copy_out(received.pinned, sent.device, 8);
    out->record()->wait();
    const Floats result = read(received);
    in->record()->wait();
    release(*device, sent);
    release(*device, received);
    return result;
  }
};

TEST_F(FakeDeviceTest, BringsWhatWasWaitedForWhateverTheOrder) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    EXPECT_EQ(round_trip(seed, true), (Floats{1, 2})) << seed;
  }
}

TEST_F(FakeDeviceTest, ShowsAWaitThatIsMissing) {
  size_t wrong = 0;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    wrong += round_trip(seed, false) == Floats{1, 2} ? 0U : 1U;
  }
  EXPECT_GT(wrong, kSeeds / 4);
}

TEST_F(FakeDeviceTest, FencesPassWhenTheyAreAskedForLongEnough) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const auto device = open(seed);
    const auto queue = device->make_queue();
    const Block memory = block(*device);
    write(memory, {3, 4});
    queue->copy_in(memory.device, memory.pinned, 8);
    const FenceRef fence = queue->record();
    int polls = 1;
    while (!fence->done()) ++polls;
    EXPECT_LE(polls, 8);
    release(*device, memory);
  }
}

TEST_F(FakeDeviceTest, DoesAnUpdateAsTheKernelsDo) {
  const auto device = open(1);
  const auto queue = device->make_queue();
  const Block value = block(*device);
  const Block gradient = block(*device);
  write(value, {5, 5});
  write(gradient, {1, 2});
  queue->copy_in(value.device, value.pinned, 8);
  queue->copy_in(gradient.device, gradient.pinned, 8);
  {
    const Contribution addend{gradient.device, DType::kFloat32, 1.0F, 8};
    SliceUpdate update;
    update.rule = RuleKind::kAdd;
    update.num_elems = 2;
    update.contributions = {&addend, 1};
    update.value_in = update.value_out = value.device;
    queue->reduce_update({&update, 1});
  }  // what it refers to may go at once
  queue->copy_out(value.pinned, value.device, 8);
  queue->record()->wait();
  EXPECT_EQ(read(value), (Floats{6, 7}));
  release(*device, value);
  release(*device, gradient);
}

TEST_F(FakeDeviceTest, WaitsForAFenceOfAnotherDevice) {
  const auto first = open(1);
  const auto second = open_device("fake:1");
  const auto in = first->make_queue();
  const auto out = second->make_queue();
  const Block here = block(*first);
  const Block there = block(*second);
  write(here, {1, 2});
  in->copy_in(here.device, here.pinned, 8);
  out->wait_for(in->record());
  out->copy(there.device, here.device, 8);
  out->copy_out(there.pinned, there.device, 8);
  out->record()->wait();
  EXPECT_EQ(read(there), (Floats{1, 2}));
  release(*first, here);
  release(*second, there);
}

TEST_F(FakeDeviceTest, GivesNoMoreMemoryThanItHas) {
  const auto device = open_device("fake:0?bytes=4096");
  std::byte* const half = device->allocate(2048);
  EXPECT_EQ(device->allocate(2112), nullptr);
  EXPECT_EQ(device->memory().free_bytes, 2048U);
  device->free(half);
  std::byte* const whole = device->allocate(4096);
  EXPECT_NE(whole, nullptr);
  device->free(whole);
}

TEST_F(FakeDeviceTest, ABatchTakesTheTableOfAnEarlierOneWhereThereIsNoMemoryForAnother) {
  const auto device = open_device("fake:0?bytes=4096");
  const auto queue = device->make_queue();
  std::byte* const pinned = device->allocate_pinned(8);
  std::byte* const memory = device->allocate(512);
  std::byte* others = device->allocate(4096 - 512);
  const CopyPiece pieces[] = {{memory, pinned, 4}, {memory + 256, pinned + 4, 4}};
  error_of(ErrorCode::OUT_OF_MEMORY, [&] { queue->copy_pieces(pieces); });
  device->free(others);
  queue->copy_pieces(pieces);  // takes a table
  others = device->allocate(device->memory().free_bytes);
  EXPECT_EQ(device->memory().free_bytes, 0U);
  for (int i = 0; i < 8; ++i) queue->copy_pieces(pieces);
  const CopyPiece more[] = {pieces[0], pieces[1], {memory + 128, pinned, 4}};
  error_of(ErrorCode::OUT_OF_MEMORY, [&] { queue->copy_pieces(more); });  // a larger one
  queue->record()->wait();
  for (std::byte* const taken : {memory, others}) device->free(taken);
  device->free_pinned(pinned);
}

TEST_F(FakeDeviceTest, FailsForGoodAndSaysWhich) {
  const auto device = open_device("fake:3?fail_after=0");
  const auto queue = device->make_queue();
  const Block memory = block(*device);
  queue->zero(memory.device, 8);
  const FenceRef fence = queue->record();
  const auto message = error_of(ErrorCode::DEVICE_FAILED, [&] { fence->wait(); });
  EXPECT_NE(message.find("fake:3"), std::string::npos) << message;
  error_of(ErrorCode::DEVICE_FAILED, [&] { (void)fence->done(); });
  error_of(ErrorCode::DEVICE_FAILED, [&] { queue->record(); });
  release(*device, memory);
}

TEST_F(FakeDeviceTest, TheHostDoesNotGetAtItsMemory) {
  const auto device = open(0);
  std::byte* const memory = device->allocate(8);
  EXPECT_DEATH(std::memset(memory, 0, 8), "");
  device->free(memory);
}

TEST(OpenDeviceTest, RefusesNamesOfNoDevice) {
  for (const char* name : {"", "cpu:0", "cuda", "cuda:x", "cuda:0?seed=1", "fake:", "fake:0?size=1",
                           "fake:0?seed=", "fake:64", "gpu:0"}) {
    const auto message = error_of(ErrorCode::BAD_ARGUMENT, [&] { open_device(name); });
    EXPECT_NE(message.find("'" + std::string(name) + "'"), std::string::npos) << message;
  }
}

}  // namespace
}  // namespace psstore::device
