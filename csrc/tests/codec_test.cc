// Encodings where Python can't reach them: deltas, and payloads that change after they were looked at. That
// the bytes are right is held against numpy by tests/kernels/test_codec.py.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "kernels/kernel_set.h"
#include "random_floats.h"

namespace psstore {
namespace {

constexpr size_t kElems = 2048 + 256 + 13;

Floats combined(const Floats& left, const Floats& right, float sign) {
  Floats result(left);
  for (size_t i = 0; i < result.size(); ++i) result[i] = result[i] + sign * right[i];
  return result;
}

class DeltaTest : public ::testing::TestWithParam<DType> {};

TEST_P(DeltaTest, EncodesTheDifferenceToTheBaseAndMovesTheBaseByWhatItSays) {
  const DType encoding = GetParam();
  const size_t num_bytes = encoded_bytes(encoding, kElems);
  const Floats value = random_floats(kElems, 1);
  const Floats base = random_floats(kElems, 2);
  const Floats difference = combined(value, base, -1);
  for (const KernelSet* kernels : runnable_kernels()) {
    std::vector<std::byte> plain(num_bytes);
    std::vector<std::byte> delta(num_bytes);
    kernels->encode({.encoding = encoding,
                     .source = difference.data(),
                     .num_elems = kElems,
                     .payload = plain.data()});
    Floats moved = base;
    kernels->encode({.encoding = encoding,
                     .source = value.data(),
                     .base = moved.data(),
                     .num_elems = kElems,
                     .payload = delta.data()});
    EXPECT_EQ(delta, plain) << kernels->name;
    Floats said(kElems);
    kernels->decode({encoding, delta.data(), num_bytes, kElems}, said.data());
    EXPECT_EQ(moved, combined(base, said, 1)) << kernels->name;
  }
}

INSTANTIATE_TEST_SUITE_P(Encodings, DeltaTest, ::testing::Values(DType::kInt8, DType::kSign));

// Shared memory is looked at once, and its owner may write to it until it is used.
TEST(TopKTest, ReachesNothingOutsideOfTheSliceWhateverItsIndices) {
  constexpr uint32_t kIndices[] = {5, 0xFFFFFFFF, 0, 2400, 1, 2317, 3};
  std::vector<std::byte> payload(sizeof kIndices * 2);
  std::memcpy(payload.data(), kIndices, sizeof kIndices);
  const Encoded encoded{DType::kTopK, payload.data(), payload.size(), kElems};
  EXPECT_FALSE(is_well_formed(encoded));
  for (const KernelSet* kernels : runnable_kernels()) {
    Floats said(kElems, 7);
    kernels->decode(encoded, said.data());
    EXPECT_EQ(said, Floats(kElems, 0)) << kernels->name;
  }
}

}  // namespace
}  // namespace psstore
