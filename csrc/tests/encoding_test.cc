// What leaves a device encoded, and what comes encoded: the host's bytes, over a fake device.
#include "device/encoding.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "gpu_support.h"
#include "kernels/codec.h"

namespace psstore {
namespace {

constexpr DType kEncodings[] = {DType::kInt8, DType::kSign, DType::kTopK, DType::kBFloat16,
                                DType::kFloat16};
constexpr size_t kSizes[] = {0, 1, 257, 5000};

// Memory of a device that can be filled and read at once.
class OnDevice {
 public:
  OnDevice(device::Device& device, device::Queue& queue, const void* content, size_t num_bytes)
      : device_(device), queue_(queue), num_bytes_(num_bytes), data_(device.allocate(num_bytes)) {
    queue_.copy_in(data_, content, num_bytes);
    queue_.record()->wait();
  }
  ~OnDevice() { device_.free(data_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  std::byte* data() const { return data_; }
  template <class T = float>
  std::vector<T> get() const {
    std::vector<T> content(num_bytes_ / sizeof(T));
    queue_.copy_out(content.data(), data_, num_bytes_);
    queue_.record()->wait();
    return content;
  }

 private:
  device::Device& device_;
  device::Queue& queue_;
  const size_t num_bytes_;
  std::byte* const data_;
};

Floats some_floats(size_t num_elems, uint32_t seed) {
  Floats floats = random_floats(num_elems, seed);
  if (num_elems > 300) floats[7] = std::numeric_limits<float>::infinity();
  return floats;
}

bool same_bits(const Floats& left, const Floats& right) {
  return left.size() == right.size() &&
         (left.empty() || std::memcmp(left.data(), right.data(), left.size() * sizeof(float)) == 0);
}

class EncodingTest : public ::testing::TestWithParam<const char*> {
 protected:
  const std::shared_ptr<device::Device> device_ = device::open_device(GetParam());
  const std::unique_ptr<device::Queue> queue_ = device_->make_queue();
};

INSTANTIATE_TEST_SUITE_P(Orders, EncodingTest,
                         ::testing::Values("fake:0", "fake:0?seed=1", "fake:0?seed=2"));

// One slice as it is given to the device, and what the host makes of the same.
struct Sent {
  device::ToSend slice;
  std::unique_ptr<OnDevice> source, lacked, lacking;
  std::vector<std::byte> payload;
  Floats residual;
};

TEST_P(EncodingTest, SlicesOfEveryKindLeaveAsTheHostEncodesThem) {
  std::vector<Sent> all;
  for (const DType encoding : kEncodings) {
    for (const size_t num_elems : kSizes) {
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
        for (const float scale : {0.0F, 1.0F, 0.3F}) {  // 0: nothing was lacking
          const auto count = static_cast<int64_t>(num_elems);
          Floats given = some_floats(num_elems, static_cast<uint32_t>(num_elems));
          std::vector<std::byte> source(num_elems * dtype_bytes(dtype));
          convert(DType::kFloat32, dtype, given.data(), source.data(), count);
          convert(dtype, DType::kFloat32, source.data(), given.data(), count);
          const Floats lacked = random_floats(num_elems, 9);
          Sent sent;
          for (const float one : lacked) sent.residual.push_back(scale == 0 ? 0 : scale * one);
          sent.source = std::make_unique<OnDevice>(*device_, *queue_, source.data(), source.size());
          const size_t num_bytes = num_elems * sizeof(float);
          sent.lacked = std::make_unique<OnDevice>(*device_, *queue_, lacked.data(), num_bytes);
          sent.lacking = std::make_unique<OnDevice>(*device_, *queue_, given.data(), num_bytes);
          sent.slice = {.encoding = encoding,
                        .num_elems = count,
                        .num_kept = count / 3,
                        .source = sent.source->data(),
                        .dtype = dtype,
                        .lacked = scale == 0 ? nullptr : sent.lacked->data(),
                        .lacked_scale = scale,
                        .lacking = sent.lacking->data()};
          sent.payload.resize(sent.slice.payload_bytes());
          encode({.encoding = encoding,
                  .source = given.data(),
                  .residual = sent.residual.data(),
                  .num_elems = count,
                  .num_kept = count / 3,
                  .payload = sent.payload.data()});
          all.push_back(std::move(sent));
        }
      }
    }
  }
  std::vector<device::ToSend> slices;
  std::vector<std::byte> expected;
  for (const Sent& sent : all) {
    slices.push_back(sent.slice);
    expected.insert(expected.end(), sent.payload.begin(), sent.payload.end());
  }
  std::vector<std::byte> got(expected.size());
  device::encode_out(*queue_, got.data(), slices);
  queue_->record()->wait();
  EXPECT_EQ(got, expected);
  for (const Sent& sent : all) EXPECT_TRUE(same_bits(sent.lacking->get(), sent.residual));
}

TEST_P(EncodingTest, HalvesAreWidenedInGroupsOfWhatThereIsRoomFor) {
  constexpr size_t kElems = 3 << 20;  // 12 MiB of floats each: no two at once
  std::vector<uint16_t> source(kElems);
  for (size_t i = 0; i < kElems; ++i) source[i] = static_cast<uint16_t>(0x3F80 + i % 64);
  Floats widened(kElems), residual(kElems, 0.0F);
  convert(DType::kBFloat16, DType::kFloat32, source.data(), widened.data(), kElems);
  std::vector<std::byte> expected(encoded_bytes(DType::kSign, kElems));
  encode({.encoding = DType::kSign,
          .source = widened.data(),
          .residual = residual.data(),
          .num_elems = kElems,
          .payload = expected.data()});
  const OnDevice given(*device_, *queue_, source.data(), 2 * kElems);
  const OnDevice first(*device_, *queue_, widened.data(), 4 * kElems);
  const OnDevice second(*device_, *queue_, widened.data(), 4 * kElems);
  std::vector<device::ToSend> slices;
  for (const OnDevice* lacking : {&first, &second}) {
    slices.push_back({.encoding = DType::kSign,
                      .num_elems = kElems,
                      .source = given.data(),
                      .dtype = DType::kBFloat16,
                      .lacking = lacking->data()});
  }
  std::vector<std::byte> got(2 * expected.size());
  device::encode_out(*queue_, got.data(), slices);
  queue_->record()->wait();
  expected.insert(expected.end(), expected.begin(), expected.end());
  EXPECT_EQ(got, expected);
  EXPECT_TRUE(same_bits(first.get(), residual));
  EXPECT_TRUE(same_bits(second.get(), residual));
}

TEST_P(EncodingTest, ChangesAreAddedAndAllElseIsWritten) {
  std::vector<std::unique_ptr<OnDevice>> values;
  std::vector<Floats> expected;
  std::vector<device::ToDecode> slices;
  std::vector<std::byte> payloads;
  for (const DType encoding :
       {DType::kInt8, DType::kFloat32, DType::kSign, DType::kBFloat16, DType::kFloat16}) {
    for (const size_t num_elems : kSizes) {
      const auto count = static_cast<int64_t>(num_elems);
      const Floats before = random_floats(num_elems, 3), change = random_floats(num_elems, 4);
      values.push_back(
          std::make_unique<OnDevice>(*device_, *queue_, before.data(), num_elems * sizeof(float)));
      slices.push_back({encoding, count, payloads.size(), values.back()->data()});
      std::vector<std::byte> payload(encoded_bytes(encoding, num_elems));
      Floats after = change;
      if (!is_encoding(encoding)) {
        convert(DType::kFloat32, encoding, change.data(), payload.data(), count);
        convert(encoding, DType::kFloat32, payload.data(), after.data(), count);
      } else {
        encode({.encoding = encoding,
                .source = change.data(),
                .num_elems = count,
                .payload = payload.data()});
        decode({encoding, payload.data(), payload.size(), num_elems}, after.data());
        for (size_t i = 0; i < num_elems; ++i) after[i] = before[i] + after[i];
      }
      expected.push_back(std::move(after));
      payloads.insert(payloads.end(), payload.begin(), payload.end());
    }
  }
  device::decode_in(*queue_, payloads.data(), payloads.size(), slices);
  queue_->record()->wait();
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_TRUE(same_bits(values[i]->get(), expected[i])) << i;
  }
}

TEST_P(EncodingTest, WhatComesInADtypeIsWrittenInTheOneThatIsWanted) {
  constexpr DType kDtypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};
  std::vector<std::byte> payloads;
  std::vector<std::unique_ptr<OnDevice>> places;
  std::vector<device::ToDecode> slices;
  std::vector<std::vector<std::byte>> expected;
  for (const DType dtype : kDtypes) {
    for (const DType to : kDtypes) {
      if (dtype != to && (dtype == DType::kFloat64 || to == DType::kFloat64)) continue;
      if (dtype == DType::kFloat32 && dtype != to) continue;  // nobody asks for more than is wanted
      Floats floats = some_floats(5001, 8);
      std::ranges::copy(std::array{-0.0F, 1e-7F, -3e-5F, 65'520.0F, 3e38F}, floats.begin());
      std::vector<std::byte> payload(5001 * dtype_bytes(dtype)), wanted(5001 * dtype_bytes(to));
      convert(DType::kFloat32, dtype, floats.data(), payload.data(), 5001);
      if (dtype == to) wanted = payload;
      if (dtype != to) convert(dtype, to, payload.data(), wanted.data(), 5001);
      const std::vector<std::byte> nothing(wanted.size());
      places.push_back(
          std::make_unique<OnDevice>(*device_, *queue_, nothing.data(), nothing.size()));
      slices.push_back({dtype, 5001, payloads.size(), places.back()->data(), to});
      payloads.insert(payloads.end(), payload.begin(), payload.end());
      expected.push_back(std::move(wanted));
    }
  }
  device::decode_in(*queue_, payloads.data(), payloads.size(), slices);
  queue_->record()->wait();
  for (size_t i = 0; i < places.size(); ++i) {
    EXPECT_TRUE(places[i]->get<std::byte>() == expected[i]) << i;
  }
}

TEST_P(EncodingTest, ValuesAreGivenOutInTheDtypeWanted) {
  const Floats floats = random_floats(5000, 2);
  const OnDevice value(*device_, *queue_, floats.data(), 20'000);
  std::vector<std::unique_ptr<OnDevice>> places;
  std::vector<device::ToGiveOut> arrays;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    places.push_back(std::make_unique<OnDevice>(*device_, *queue_, floats.data(), 20'000));
    arrays.push_back({value.data() + 4, 4999, places.back()->data() + 1, dtype});
  }
  device::give_out(*queue_, arrays);
  queue_->record()->wait();
  for (size_t i = 0; i < arrays.size(); ++i) {
    std::vector<std::byte> expected(20'000);
    std::memcpy(expected.data(), floats.data(), 20'000);
    convert(DType::kFloat32, arrays[i].dtype, floats.data() + 1, expected.data() + 1, 4999);
    EXPECT_EQ(places[i]->get<std::byte>(), expected);
  }
}

TEST(EncodingTest, NothingIsDoneWhereThereIsNoRoomForThePayloads) {
  const auto device = device::open_device("fake:0?bytes=65536");
  const auto queue = device->make_queue();
  const Floats floats = random_floats(8192, 1);
  const OnDevice source(*device, *queue, floats.data(), 32768);
  const OnDevice lacking(*device, *queue, floats.data(), 32768 - 256);
  std::vector<std::byte> to(16384);
  const device::ToSend slice{.encoding = DType::kBFloat16,
                             .num_elems = 8000,
                             .source = source.data(),
                             .lacking = lacking.data()};
  EXPECT_THROW(device::encode_out(*queue, to.data(), {&slice, 1}), Error);
  EXPECT_EQ(lacking.get(), Floats(floats.begin(), floats.end() - 64));
}

}  // namespace
}  // namespace psstore
