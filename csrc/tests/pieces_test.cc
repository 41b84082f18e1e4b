// Many pieces copied together: by the GPU's body, run on the host, and between a device and the host.
#include "device/pieces.h"

#include <random>

#include "gpu_support.h"
#include "kernels/gpu/copy_plan.h"
#include "table_support.h"

namespace psstore {
namespace {

std::vector<std::byte> random_bytes(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

// ---- the body ---------------------------------------------------------------------------------------

// As cuda_copy_pieces_async() launches it.
void copy_like_a_gpu(std::span<const CopyPiece> pieces) {
  const gpu::CopyPlan plan(pieces);
  Shifted table(plan.num_bytes(), 0);
  plan.write(table.data());
  run_on_host(gpu::CopyBody{plan.view(table.data())}, static_cast<int64_t>(plan.num_blocks()));
}

// One chunk is 16 KiB.
constexpr size_t kPieceSizes[] = {1, 3, 15, 16, 17, 64, 1000, 16384, 16385, 40001, 70000};

TEST(GpuCopyTest, EverySizeAndAlignmentOfBothSidesArrivesAndNothingElseIsWritten) {
  for (size_t from_shift = 0; from_shift < 16; ++from_shift) {
    for (const size_t to_shift : {0U, 1U, 2U, 4U, 8U, 13U}) {
      std::vector<Shifted> sources, targets;
      CopyList copies;
      for (const size_t size : kPieceSizes) {
        sources.emplace_back(random_bytes(size, size + from_shift).data(), size, from_shift);
        targets.emplace_back(size, to_shift);
      }
      for (size_t i = 0; i < sources.size(); ++i) {
        copies.add(targets[i].data(), sources[i].data(), sources[i].size());
      }
      copy_like_a_gpu(copies.pieces());
      EXPECT_EQ(targets, sources) << from_shift << " to " << to_shift;
    }
  }
}

TEST(GpuCopyTest, TenThousandSmallPiecesAreOneLaunchOfTwoForEachBlock) {
  const std::vector<CopyPiece> pieces(10'000, {nullptr, nullptr, 4096});
  EXPECT_EQ(gpu::CopyPlan(pieces).num_blocks(), 5'000U);
}

// Pieces that no memory here could hold: their addresses are never followed.
TEST(GpuCopyTest, PiecesBeyondTwoToTheThirtyOneAreCoveredByBlocksInOrder) {
  auto* const address = reinterpret_cast<std::byte*>(uintptr_t{0x1003});
  const CopyPiece pieces[] = {{address, address, (size_t{1} << 33) + 5},
                              {address, address, 7},
                              {address, address, 1u << 31}};
  const gpu::CopyPlan plan(pieces);
  Shifted table(plan.num_bytes(), 0);
  plan.write(table.data());
  const gpu::CopyView view = plan.view(table.data());
  EXPECT_LE(view.grid.num_blocks(), gpu::kMaxBlocks);
  std::vector<int64_t> next(std::size(pieces), 0);  // chunk that each piece is at
  for (int64_t block = 0; block < view.grid.num_blocks(); ++block) {
    gpu::visit_slices(view, block, [&](const gpu::CopySlice& slice, int64_t begin, int64_t end) {
      int64_t& chunk = next[static_cast<size_t>(&slice - view.slices)];
      EXPECT_EQ(begin, chunk);
      chunk = end;
    });
  }
  for (size_t i = 0; i < std::size(pieces); ++i) EXPECT_EQ(next[i], view.slices[i].num_chunks());
}

// ---- lists ------------------------------------------------------------------------------------------

TEST(CopyListTest, PiecesStayApartAndEmptyOnesAreLeftOut) {
  std::byte to[100] = {}, from[100] = {};
  CopyList copies;
  copies.add(to, from, 10);
  copies.add(to + 10, from + 10, 20);
  copies.add(to + 35, from + 36, 0);
  copies.add(to + 36, from + 36, 1);
  std::vector<size_t> sizes;
  for (const CopyPiece& piece : copies.pieces()) sizes.push_back(piece.num_bytes);
  EXPECT_EQ(sizes, (std::vector<size_t>{10, 20, 1}));
}

// Two tensors of a caller's whose memory happens to touch.
TEST(CopyListTest, PiecesOfTwoAllocationsSideBySideAreCopied) {
  const auto device = device::open_device("fake:0");
  constexpr size_t kBytes = 64 << 10;
  std::byte* const first = device->allocate(kBytes);
  std::byte* const second = device->allocate(kBytes);
  std::byte* const host = device->allocate_pinned(2 * kBytes);
  const auto queue = device->make_queue();
  ASSERT_EQ(second, first + kBytes);
  const std::vector<std::byte> given = random_bytes(2 * kBytes, 1);
  std::memcpy(host, given.data(), 2 * kBytes);
  CopyList in, out;
  in.add(first, host, kBytes);
  in.add(second, host + kBytes, kBytes);
  device::copy_pieces_in(*queue, in.pieces());
  queue->record()->wait();
  std::memset(host, 0, 2 * kBytes);
  out.add(host, first, kBytes);
  out.add(host + kBytes, second, kBytes);
  device::copy_pieces_out(*queue, out.pieces());
  queue->record()->wait();
  EXPECT_EQ(std::vector<std::byte>(host, host + 2 * kBytes), given);
  EXPECT_THROW(queue->copy_in(first, host, 2 * kBytes), Error);
  device->free_pinned(host);
  device->free(second);
  device->free(first);
}

// ---- between a device and the host ------------------------------------------------------------------

constexpr size_t kHostBytes = 20'000;
constexpr size_t kPiece = 100;

// Pieces of a device's memory, far apart, that lie together on the host but for one gap.
class PiecesTest : public ::testing::TestWithParam<const char*> {
 protected:
  PiecesTest() : given_(random_bytes(kHostBytes, 1)) {
    std::memcpy(host_, given_.data(), kHostBytes);
  }
  ~PiecesTest() override {
    device_->free_pinned(host_);
    device_->free(memory_);
  }

  std::vector<CopyPiece> pieces(std::byte* host, bool in) const {
    std::vector<CopyPiece> made;
    for (size_t i = 0, offset = 0; offset + kPiece < kHostBytes; ++i, offset += kPiece) {
      if (i == 50) offset += 4;
      std::byte* const there = memory_ + 3 * kPiece * (kHostBytes / kPiece - i);
      made.push_back(in ? CopyPiece{there, host + offset, kPiece}
                        : CopyPiece{host + offset, there, kPiece});
    }
    return made;
  }

  const std::shared_ptr<device::Device> device_ = device::open_device(GetParam());
  const std::unique_ptr<device::Queue> queue_ = device_->make_queue();
  std::byte* const memory_ = device_->allocate(4 * kHostBytes);
  std::byte* const host_ = device_->allocate_pinned(kHostBytes);
  const std::vector<std::byte> given_;
};

TEST_P(PiecesTest, GoInAndOutInFewCopies) {
  device::copy_pieces_in(*queue_, pieces(host_, true));
  queue_->record()->wait();
  std::memset(host_, 0, kHostBytes);
  const std::vector<CopyPiece> out = pieces(host_, false);
  device::copy_pieces_out(*queue_, out);
  queue_->record()->wait();
  for (const CopyPiece& piece : out) {
    const auto* expected = given_.data() + (piece.to - host_);
    ASSERT_EQ(std::memcmp(piece.to, expected, kPiece), 0);
  }
}

// Two runs of pieces, each of them a copy and a launch, both ways.
INSTANTIATE_TEST_SUITE_P(Orders, PiecesTest,
                         ::testing::Values("fake:0?fail_after=8", "fake:0?seed=1&fail_after=8",
                                           "fake:0?seed=2&fail_after=8"));

TEST(PiecesTest, GoOneByOneWhereTheDeviceHasNoMemoryLeft) {
  const auto device = device::open_device("fake:0?bytes=65536");
  std::byte* const all = device->allocate(65536);
  std::byte* const host = device->allocate_pinned(256);
  const auto queue = device->make_queue();
  queue->zero(all, 65536);
  const CopyPiece pieces[] = {{host, all + 1000, 128}, {host + 128, all, 128}};
  device::copy_pieces_out(*queue, pieces);
  queue->record()->wait();
  EXPECT_EQ(std::vector<std::byte>(host, host + 256), std::vector<std::byte>(256));
  device->free_pinned(host);
  device->free(all);
}

}  // namespace
}  // namespace psstore
