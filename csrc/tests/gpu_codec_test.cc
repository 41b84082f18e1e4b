// The GPU's conversions and encodings, their bodies run on the host: the bytes of the CPU's kernels.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <span>
#include <type_traits>

#include "gpu_support.h"
#include "kernels/codec.h"
#include "kernels/gpu/change_body.h"
#include "kernels/gpu/convert_body.h"
#include "kernels/gpu/encode_plan.h"
#include "kernels/gpu/topk_body.h"

namespace psstore {
namespace {

constexpr size_t kSizes[] = {0, 1, 15, 16, 17, 255, 256, 257, 4097};

template <class From, class To>
void expect_converted(DType from, DType to) {
  for (const size_t num_elems : kSizes) {
    const auto count = static_cast<int64_t>(num_elems);
    for (size_t shift : {size_t{0}, sizeof(To), size_t{1}}) {
      Floats floats = random_floats(num_elems, 1);
      if (num_elems > 20) floats[3] = 1e-40F, floats[9] = 70'000.0F;
      Shifted source(num_elems * sizeof(From), shift);
      convert(DType::kFloat32, from, floats.data(), source.data(), count);
      Shifted expected(num_elems * sizeof(To), shift);
      Shifted got = expected;
      convert(from, to, source.data(), expected.data(), count);
      const int lead = static_cast<int>(shift / sizeof(To));
      const gpu::VectorMap vectors{count, gpu::kConvertElems, lead};
      const auto grid = gpu::Grid::of(vectors.num_chunks());
      run_on_host(
          gpu::WriteBody<gpu::Converted<From, To>>{vectors, grid, {source.data()}, got.data()},
          grid.num_blocks());
      EXPECT_EQ(got, expected) << static_cast<int>(from) << " to " << static_cast<int>(to);
    }
  }
}

template <class From>
void expect_converted_from(DType from) {
  expect_converted<From, float>(from, DType::kFloat32);
  expect_converted<From, double>(from, DType::kFloat64);
  expect_converted<From, BFloat16>(from, DType::kBFloat16);
  expect_converted<From, Float16>(from, DType::kFloat16);
}

TEST(GpuConvertTest, GivesTheBytesOfTheCpuAtAnyAddress) {
  expect_converted_from<float>(DType::kFloat32);
  expect_converted_from<double>(DType::kFloat64);
  expect_converted_from<BFloat16>(DType::kBFloat16);
  expect_converted_from<Float16>(DType::kFloat16);
}

template <class Test>
bool flagged(const Test& test, const void* data, int64_t num_elems, int lead) {
  using Body = gpu::FiniteBody<Test>;
  const gpu::VectorMap vectors{num_elems, Body::kElems, lead};
  const auto grid = gpu::Grid::of(vectors.num_chunks());
  uint32_t flag = 0;
  run_on_host(Body{vectors, grid, data, test, &flag}, grid.num_blocks());
  return flag != 0;
}

TEST(GpuFiniteTest, OneElementThatIsNotFiniteIsFoundWhereverItIs) {
  constexpr size_t kElems = 1031;
  Floats floats = random_floats(kElems, 1);
  EXPECT_FALSE(flagged(gpu::Float32Test{}, floats.data(), kElems, 0));
  for (const size_t place : {size_t{0}, size_t{1}, size_t{1024}, kElems - 1}) {
    const float before = floats[place];
    for (const float wrong :
         {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
      floats[place] = wrong;
      EXPECT_TRUE(flagged(gpu::Float32Test{}, floats.data(), kElems, 3)) << place;
      std::vector<uint16_t> half(kElems);
      convert(DType::kFloat32, DType::kFloat16, floats.data(), half.data(), kElems);
      EXPECT_TRUE(flagged(gpu::Float16Test{}, half.data(), kElems, 5)) << place;
      convert(DType::kFloat32, DType::kBFloat16, floats.data(), half.data(), kElems);
      EXPECT_TRUE(flagged(gpu::BFloat16Test{}, half.data(), kElems, 0)) << place;
      std::vector<double> wide(floats.begin(), floats.end());
      EXPECT_TRUE(flagged(gpu::Float64Test{}, wide.data(), kElems, 1)) << place;
    }
    floats[place] = before;
  }
}

TEST(GpuFiniteTest, AScaleThatItsCodesWouldOverflowIsNotFinite) {
  const float scales[] = {1.0F, 0x1p121F};
  EXPECT_TRUE(flagged(gpu::ScaleTest{largest_code(DType::kInt8)}, scales, 2, 0));
  EXPECT_FALSE(flagged(gpu::ScaleTest{largest_code(DType::kSign)}, scales, 2, 0));
}

// A constructor would be called by every thread, while others are in the first phase already.
template <class Body>
constexpr bool kSharesPlainMemory =
    std::is_trivially_default_constructible_v<typename Body::Shared>;
static_assert(kSharesPlainMemory<gpu::EncodeBody> && kSharesPlainMemory<gpu::ChangeBody> &&
              kSharesPlainMemory<gpu::TopkCountBody> && kSharesPlainMemory<gpu::TopkPickBody> &&
              kSharesPlainMemory<gpu::TopkTileBody> && kSharesPlainMemory<gpu::TopkScanBody> &&
              kSharesPlainMemory<gpu::TopkWriteBody> &&
              kSharesPlainMemory<gpu::SquaresBody<float>>);

// ---- encodings --------------------------------------------------------------------------------------

void encode_topk_like_a_gpu(const ToEncode& what) {
  std::vector<uint64_t> memory(gpu::topk_scratch_bytes(what) / sizeof(uint64_t), ~uint64_t{0});
  auto* scratch = reinterpret_cast<gpu::TopkScratch*>(memory.data());
  const int64_t num_tiles = gpu::num_topk_tiles(what);
  run_on_host(gpu::TopkBeginBody{what, scratch}, 1);
  for (int digit = 0; digit < 3 && what.num_kept > 0; ++digit) {
    run_on_host(gpu::TopkCountBody{what, scratch, digit}, num_tiles);
    run_on_host(gpu::TopkPickBody{scratch, digit}, 1);
  }
  run_on_host(gpu::TopkTileBody{what, scratch}, num_tiles);
  run_on_host(gpu::TopkScanBody{num_tiles, scratch}, 1);
  run_on_host(gpu::TopkWriteBody{what, scratch}, num_tiles);
}

// As cuda_encode_async() launches it.
void encode_like_a_gpu(std::span<const ToEncode> batch) {
  const gpu::EncodePlan plan(batch);
  Shifted table(plan.num_bytes(), 0);
  plan.write(table.data());
  run_on_host(gpu::EncodeBody{plan.view(table.data())}, static_cast<int64_t>(plan.num_blocks()));
  for (const ToEncode& what : batch) {
    if (what.encoding == DType::kTopK) encode_topk_like_a_gpu(what);
  }
}

void decode_like_a_gpu(const Encoded& encoded, void* destination) {
  const auto num_elems = static_cast<int64_t>(encoded.num_elems);
  const gpu::VectorMap vectors{num_elems, gpu::kConvertElems, 0};
  const auto grid = gpu::Grid::of(vectors.num_chunks());
  const gpu::Source source{encoded.payload, encoded.num_bytes, 1.0F, encoded.encoding};
  run_on_host(gpu::WriteBody<gpu::Decoded>{vectors, grid, {source}, destination},
              grid.num_blocks());
}

// What is kept of an encoding besides its payload.
enum class Keeps { kNothing, kResidual, kBase };

// Encodes on both and compares the payload, what is kept, and what is decoded: halves are no encodings.
void expect_encoded(DType encoding, const Floats& source, size_t num_kept, Keeps keeps,
                    size_t shift) {
  const size_t num_elems = source.size();
  const size_t num_bytes = encoded_bytes(encoding, num_elems, num_kept);
  const Floats other = random_floats(num_elems, 77);
  Shifted kept(other.data(), num_elems * sizeof(float), shift);
  Shifted payload(num_bytes, shift);
  Shifted gpu_kept = kept;
  Shifted gpu_payload = payload;
  const auto what = [&](Shifted& keep, Shifted& to) {
    return ToEncode{.encoding = encoding,
                    .source = source.data(),
                    .residual = keeps == Keeps::kResidual ? keep.data() : nullptr,
                    .base = keeps == Keeps::kBase ? keep.data() : nullptr,
                    .num_elems = static_cast<int64_t>(num_elems),
                    .num_kept = static_cast<int64_t>(num_kept),
                    .payload = to.data()};
  };
  encode(what(kept, payload));
  const ToEncode on_gpu = what(gpu_kept, gpu_payload);
  encode_like_a_gpu({&on_gpu, 1});
  EXPECT_EQ(gpu_payload, payload) << num_elems << " elements, " << num_kept << " kept";
  EXPECT_EQ(gpu_kept, kept) << num_elems << " elements, " << num_kept << " kept";
  if (!is_encoding(encoding)) return;
  Shifted decoded(num_elems * sizeof(float), 0);
  Shifted gpu_decoded = decoded;
  decode({encoding, payload.data(), num_bytes, num_elems}, decoded.data());
  decode_like_a_gpu({encoding, payload.data(), num_bytes, num_elems}, gpu_decoded.data());
  EXPECT_EQ(gpu_decoded, decoded) << num_elems << " elements, " << num_kept << " kept";
}

// Equal magnitudes at the cut, tiny and infinite ones.
Floats awkward_floats(size_t num_elems) {
  Floats floats = random_floats(num_elems, 5);
  for (size_t i = 0; i < num_elems; i += 3) floats[i] = i % 2 == 0 ? 0.5F : -0.5F;
  if (num_elems > 300) {
    std::fill(floats.begin() + 256, floats.begin() + 300, 1e-44F);
    floats[7] = std::numeric_limits<float>::infinity();
  }
  return floats;
}

TEST(GpuEncodeTest, BlocksHaveTheBytesOfTheCpu) {
  for (const DType encoding : {DType::kInt8, DType::kSign}) {
    for (const Keeps keeps : {Keeps::kNothing, Keeps::kResidual, Keeps::kBase}) {
      for (const size_t num_elems : kSizes) {
        expect_encoded(encoding, random_floats(num_elems, 3), 0, keeps, num_elems % 5);
        expect_encoded(encoding, awkward_floats(num_elems), 0, keeps, 0);
        expect_encoded(encoding, Floats(num_elems, 0.0F), 0, keeps, 0);
      }
    }
  }
}

TEST(GpuEncodeTest, HalvesHaveTheBytesOfTheCpuAtAnyAddress) {
  for (const DType encoding : {DType::kBFloat16, DType::kFloat16}) {
    for (const Keeps keeps : {Keeps::kNothing, Keeps::kResidual}) {
      for (const size_t num_elems : kSizes) {
        for (const size_t shift : {0U, 1U, 2U, 4U, 13U}) {
          expect_encoded(encoding, awkward_floats(num_elems), 0, keeps, shift);
        }
        expect_encoded(encoding, Floats(num_elems, 70'000.0F), 0, keeps, 0);
      }
    }
  }
}

TEST(GpuEncodeTest, SlicesOfAllEncodingsAndSizesAreOneLaunch) {
  std::vector<Shifted> payloads, residuals;
  std::vector<Floats> sources;
  std::vector<ToEncode> batch;
  for (const DType encoding :
       {DType::kInt8, DType::kBFloat16, DType::kTopK, DType::kSign, DType::kFloat16}) {
    for (const size_t num_elems : kSizes) {
      sources.push_back(awkward_floats(num_elems));
      const Floats other = random_floats(num_elems, 6);
      residuals.emplace_back(other.data(), num_elems * sizeof(float), num_elems % 5);
      payloads.emplace_back(encoded_bytes(encoding, num_elems, num_elems / 3), num_elems % 7);
      batch.push_back({.encoding = encoding,
                       .source = sources.back().data(),
                       .num_elems = static_cast<int64_t>(num_elems),
                       .num_kept = static_cast<int64_t>(num_elems / 3)});
    }
  }
  auto expected = std::pair(payloads, residuals);
  auto got = expected;
  const auto placed = [&](auto& to) {
    for (size_t i = 0; i < batch.size(); ++i) {
      batch[i].payload = to.first[i].data();
      batch[i].residual = to.second[i].data();
    }
    return std::span<const ToEncode>(batch);
  };
  for (const ToEncode& what : placed(expected)) encode(what);
  encode_like_a_gpu(placed(got));
  EXPECT_EQ(got, expected);
}

// As cuda_encode_changes_async() launches it.
void encode_changes_like_a_gpu(std::span<const ToEncode> batch) {
  const gpu::EncodePlan plan(batch);
  Shifted table(plan.num_bytes(), 0);
  plan.write(table.data());
  const gpu::EncodeView view = plan.view(table.data());
  run_on_host(gpu::EncodeBody{view}, static_cast<int64_t>(plan.num_blocks()));
  run_on_host(gpu::ChangeBody{view.slices}, static_cast<int64_t>(batch.size()));
}

TEST(GpuEncodeTest, ABaseFollowsItsSourceWhetherTheChangeCanBeSaidOrNot) {
  constexpr size_t kLarge = 257 * 256;  // more blocks than threads
  std::vector<Floats> sources, bases;
  std::vector<Shifted> payloads;
  std::vector<ToEncode> batch;
  size_t num_unsaid = 0;
  for (const DType encoding : {DType::kInt8, DType::kSign}) {
    for (const size_t num_elems : {size_t{0}, size_t{1}, size_t{300}, kLarge}) {
      // Everywhere finite, not so in the last element, and finite with a scale that is not.
      for (const float last : {1.0F, std::numeric_limits<float>::quiet_NaN(), 3e38F}) {
        sources.push_back(random_floats(num_elems, 8));
        bases.push_back(random_floats(num_elems, 9));
        if (num_elems > 0) sources.back().back() = last;
        if (num_elems > 0) bases.back().back() = -last;
        payloads.emplace_back(encoded_bytes(encoding, num_elems), num_elems % 3);
        batch.push_back({.encoding = encoding, .num_elems = static_cast<int64_t>(num_elems)});
      }
    }
  }
  std::vector<Floats> gpu_bases = bases;
  std::vector<Shifted> gpu_payloads = payloads;
  const auto placed = [&](std::vector<Floats>& base, std::vector<Shifted>& payload) {
    for (size_t i = 0; i < batch.size(); ++i) {
      batch[i].source = sources[i].data();
      batch[i].base = base[i].data();
      batch[i].payload = payload[i].data();
    }
    return std::span<const ToEncode>(batch);
  };
  for (const ToEncode& what : placed(bases, payloads)) num_unsaid += encode_change(what) ? 0 : 1;
  encode_changes_like_a_gpu(placed(gpu_bases, gpu_payloads));
  EXPECT_EQ(gpu_payloads, payloads);
  EXPECT_EQ(num_unsaid, 12U);
  for (size_t i = 0; i < batch.size(); ++i) {
    const auto bits = [](const Floats& floats) { return std::as_bytes(std::span(floats)); };
    EXPECT_TRUE(std::ranges::equal(bits(gpu_bases[i]), bits(bases[i]))) << i;
  }
}

// Slices that no memory here could hold: their addresses are never followed.
TEST(GpuEncodeTest, SlicesBeyondTwoToTheThirtyOneAreCoveredByBlocksInOrder) {
  const ToEncode batch[] = {{.num_elems = (int64_t{1} << 33) + 5},
                            {.encoding = DType::kTopK, .num_elems = 5000},
                            {.num_elems = 0},
                            {.encoding = DType::kBFloat16, .num_elems = 7},
                            {.encoding = DType::kSign, .num_elems = 4097}};
  const gpu::EncodePlan plan(batch);
  Shifted table(plan.num_bytes(), 0);
  plan.write(table.data());
  const gpu::EncodeView view = plan.view(table.data());
  const auto blocks_of_first = ((uint64_t{1} << 33) + 5 + 2047) / 2048;
  ASSERT_EQ(plan.num_blocks(), blocks_of_first + 1 + 3);
  for (uint64_t block = 0; block < plan.num_blocks(); ++block) {
    const gpu::EncodeSlice& slice = view.slices[view.first_slices[block]];
    const int64_t chunk = static_cast<int64_t>(block) - slice.first_chunk;
    ASSERT_TRUE(chunk >= 0 && chunk < slice.num_chunks()) << block;
  }
}

TEST(GpuEncodeTest, TheLargestAreTheOnesThatTheCpuKeepsTiesIncluded) {
  for (const Keeps keeps : {Keeps::kNothing, Keeps::kResidual}) {
    for (const size_t num_elems : {0U, 1U, 17U, 257U, 4097U, 9000U}) {
      for (const size_t num_kept : {size_t{0}, num_elems / 100, num_elems / 3, num_elems}) {
        expect_encoded(DType::kTopK, random_floats(num_elems, 3), num_kept, keeps, 0);
        expect_encoded(DType::kTopK, awkward_floats(num_elems), num_kept, keeps, num_elems % 5);
        expect_encoded(DType::kTopK, Floats(num_elems, 1.0F), num_kept, keeps, 0);
      }
    }
  }
}

}  // namespace
}  // namespace psstore
