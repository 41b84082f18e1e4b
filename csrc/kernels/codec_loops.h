// Encoding a slice, and decoding one or a block of it on the way into a sum.
//
// Included only by the .cc file of each instruction set and by reduce.h: see loops.h for why everything
// is in an unnamed namespace.
#pragma once

#include "kernels/codec_blocks.h"
#include "kernels/codec_topk.h"

namespace psstore {
namespace {

// ---- encoding -------------------------------------------------------------------------------------

// Element i of source + residual.
[[gnu::always_inline]] inline auto input_of(const ToEncode& what) {
  return [source = static_cast<const std::byte*>(what.source),
          residual = static_cast<const std::byte*>(what.residual)](int64_t i) {
    const float x = load<float>(source, i);
    return residual == nullptr ? x : x + load<float>(residual, i);
  };
}

// A block of the input, filled up with zeros.
inline void read_block(const ToEncode& what, int64_t begin, int64_t count, float* x) {
  const auto input = input_of(what);
  for_each_index(count, [=](int64_t i) { x[i] = input(begin + i); });
  std::fill(x + count, x + kEncodedBlock, 0.0F);
}

inline void keep_rest(const ToEncode& what, int64_t begin, int64_t count, const float* rest) {
  if (what.residual == nullptr) return;
  constexpr int64_t kBytes = sizeof(float);
  std::memcpy(static_cast<std::byte*>(what.residual) + begin * kBytes, rest,
              static_cast<size_t>(count * kBytes));
}

// Calls `encode_block(x, count, codes)`, which returns the scale, leaves the rest in x and writes
// kCodeBits for each element of a whole block.
template <int kCodeBits, class EncodeBlock>
void encode_blocks(const ToEncode& what, EncodeBlock encode_block) {
  auto* scales = static_cast<std::byte*>(what.payload);
  std::byte* codes = scales + codes_offset(what.num_elems);
  alignas(64) float x[kEncodedBlock];
  alignas(64) std::byte block_codes[kEncodedBlock * kCodeBits / 8];
  for (int64_t begin = 0; begin < what.num_elems; begin += kEncodedBlock) {
    const int64_t count = std::min(kEncodedBlock, what.num_elems - begin);
    read_block(what, begin, count, x);
    const float scale = encode_block(x, count, block_codes);
    store(scales, begin / kEncodedBlock, scale);
    std::memcpy(codes + begin * kCodeBits / 8, block_codes,
                static_cast<size_t>((count * kCodeBits + 7) / 8));
    if (is_finite(scale)) keep_rest(what, begin, count, x);
  }
}

void encode_loop(const ToEncode& what) {
  if (what.encoding == DType::kTopK) return encode_topk(input_of(what), what);
  if (what.encoding == DType::kInt8) {
    return encode_blocks<8>(what, [](float* x, int64_t, std::byte* codes) {
      const float scale = int8_scale(x);
      encode_int8_block(scale, x, reinterpret_cast<int8_t*>(codes));
      return scale;
    });
  }
  encode_blocks<1>(what, [](float* x, int64_t count, std::byte* bits) {
    const float scale = sign_scale(x, count);
    encode_sign_block(scale, x, reinterpret_cast<uint8_t*>(bits));
    return scale;
  });
}

// ---- decoding -------------------------------------------------------------------------------------

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

// The elements from `begin`, which begins a block, on.
void decode_range(const Encoded& encoded, int64_t begin, int64_t count, float* out) {
  if (encoded.encoding == DType::kTopK) return decode_topk(encoded, begin, count, out);
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
  for (int64_t begin = 0; begin < num_elems; begin += kBlockElems) {
    const int64_t count = std::min(kBlockElems, num_elems - begin);
    decode_range(encoded, begin, count, block);
    std::memcpy(static_cast<std::byte*>(destination) + begin * kBytes, block,
                static_cast<size_t>(count * kBytes));
  }
}

}  // namespace
}  // namespace psstore
