// Decoding a slice, or a block of it on the way into a sum.
//
// Included only by the .cc file of each instruction set and by sums.h: see loops.h for why everything is in an
// unnamed namespace.
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/codec.h"
#include "kernels/codec_elements.h"
#include "kernels/elements.h"

namespace psstore {
namespace {

static_assert(kBlockElems % kEncodedBlock == 0 && kEncodedBlock % kShortBlockElems == 0,
              "a block of the reduction begins with a scale, or has one for all");

inline void decode_int8_block(float scale, const std::byte* codes, int64_t count, float* out) {
  for_each_index(count, [=](int64_t i) { out[i] = decoded_int8(scale, load<int8_t>(codes, i)); });
}

// Fills `out` up to the last bit of the last byte. The bits of a byte from a table: not every instruction set
// shifts each element by another number of bits.
inline void decode_sign_block(float scale, const std::byte* bits, int64_t count, float* out) {
  static constexpr uint32_t kBits[] = {1, 2, 4, 8, 16, 32, 64, 128};
  const auto positive = std::bit_cast<uint32_t>(scale);
  for (int64_t begin = 0; begin < count; begin += 8) {
    const auto byte = static_cast<uint32_t>(load<uint8_t>(bits, begin / 8));
    for_each_index(8, [=](int64_t bit) {
      const uint32_t sign = (byte & kBits[bit]) != 0 ? kSignBit : 0;
      out[begin + bit] = std::bit_cast<float>(positive ^ sign);
    });
  }
}

// Where the entries from element `begin` on begin: at `guess` if that is so, else searched.
template <class IndexAt>
int64_t first_entry_near(IndexAt index_at, int64_t num_kept, int64_t begin, int64_t guess) {
  const bool is_right = guess <= num_kept && (guess == 0 || index_at(guess - 1) < begin) &&
                        (guess == num_kept || index_at(guess) >= begin);
  return is_right ? guess : first_entry(index_at, num_kept, begin);
}

// `entry`: a guess, from 0 on, where the entries from `begin` on begin; becomes where those of the next block do.
// Indices that do not ascend spoil the block and reach nothing outside of it: they may lie in memory that
// somebody else can still write to.
inline void decode_topk(const Encoded& encoded, int64_t begin, int64_t count, float* out,
                        int64_t& entry) {
  const auto num_kept = static_cast<int64_t>(encoded.num_bytes / kTopKEntryBytes);
  const auto* indices = static_cast<const std::byte*>(encoded.payload);
  const std::byte* values = indices + num_kept * static_cast<int64_t>(sizeof(uint32_t));
  std::fill_n(out, count, 0.0F);
  const auto index_at = [=](int64_t i) { return int64_t{load<uint32_t>(indices, i)}; };
  entry = first_entry_near(index_at, num_kept, begin, entry);
  for (; entry < num_kept; ++entry) {
    const int64_t place = index_at(entry) - begin;
    if (place < 0 || place >= count) return;
    out[place] = load<float>(values, entry);
  }
}

template <class DecodeBlock>
void decode_blocks(const Encoded& encoded, int64_t begin, int64_t count, float* out,
                   DecodeBlock decode_block) {
  const auto* scales = static_cast<const std::byte*>(encoded.payload);
  const std::byte* codes = scales + codes_offset(static_cast<int64_t>(encoded.num_elems));
  for (int64_t done = 0; done < count; done += kEncodedBlock) {
    const float scale = load<float>(scales, (begin + done) / kEncodedBlock);
    decode_block(scale, codes, begin + done, std::min(kEncodedBlock, count - done), out + done);
  }
}

// The elements from `begin` on, which begins a block or lies with all of them in one. `entry`: as decode_topk().
void decode_range(const Encoded& encoded, int64_t begin, int64_t count, float* out,
                  int64_t& entry) {
  if (encoded.encoding == DType::kTopK) return decode_topk(encoded, begin, count, out, entry);
  if (encoded.encoding == DType::kInt8) {
    return decode_blocks(encoded, begin, count, out,
                         [](float scale, const std::byte* codes, int64_t from, int64_t length,
                            float* to) { decode_int8_block(scale, codes + from, length, to); });
  }
  decode_blocks(encoded, begin, count, out,
                [](float scale, const std::byte* bits, int64_t from, int64_t length, float* to) {
                  decode_sign_block(scale, bits + from / 8, length, to);
                });
}

void decode_loop(const Encoded& encoded, void* destination) {
  constexpr int64_t kBytes = sizeof(float);
  alignas(64) float block[kBlockElems];
  const auto num_elems = static_cast<int64_t>(encoded.num_elems);
  int64_t entry = 0;
  for (int64_t begin = 0; begin < num_elems; begin += kBlockElems) {
    const int64_t count = std::min(kBlockElems, num_elems - begin);
    decode_range(encoded, begin, count, block, entry);
    std::memcpy(static_cast<std::byte*>(destination) + begin * kBytes, block,
                static_cast<size_t>(count * kBytes));
  }
}

}  // namespace
}  // namespace psstore
