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

// A block of the way through: what is to be encoded, filled up with zeros, and what its payload says.
struct BlockBuffers {
  alignas(64) float x[kEncodedBlock];
  alignas(64) float decoded[kEncodedBlock];
  alignas(64) std::byte codes[kEncodedBlock];
};

[[gnu::always_inline]] inline const std::byte* floats_from(const void* floats, int64_t begin) {
  return static_cast<const std::byte*>(floats) + begin * static_cast<int64_t>(sizeof(float));
}
[[gnu::always_inline]] inline std::byte* floats_from(void* floats, int64_t begin) {
  return static_cast<std::byte*>(floats) + begin * static_cast<int64_t>(sizeof(float));
}

inline void read_block(const ToEncode& what, int64_t begin, int64_t count, float* x) {
  const std::byte* source = floats_from(what.source, begin);
  if (what.residual != nullptr) {
    const std::byte* residual = floats_from(what.residual, begin);
    for_each_index(count,
                   [=](int64_t i) { x[i] = load<float>(source, i) + load<float>(residual, i); });
  } else if (what.base != nullptr) {
    const std::byte* base = floats_from(what.base, begin);
    for_each_index(count, [=](int64_t i) { x[i] = load<float>(source, i) - load<float>(base, i); });
  } else {
    for_each_index(count, [=](int64_t i) { x[i] = load<float>(source, i); });
  }
  std::fill(x + count, x + kEncodedBlock, 0.0F);
}

inline void keep_block(const ToEncode& what, int64_t begin, int64_t count, bool finite,
                       const float* x, const float* decoded) {
  if (what.residual != nullptr && finite) {
    std::byte* residual = floats_from(what.residual, begin);
    for_each_index(count, [=](int64_t i) { store(residual, i, x[i] - decoded[i]); });
  } else if (what.base != nullptr) {
    std::byte* base = floats_from(what.base, begin);
    for_each_index(count, [=](int64_t i) { store(base, i, load<float>(base, i) + decoded[i]); });
  }
}

// Calls `encode_block(count, buffers)`, which returns the scale and makes kCodeBits of each element.
template <int kCodeBits, class EncodeBlock>
void encode_blocks(const ToEncode& what, EncodeBlock encode_block) {
  auto* scales = static_cast<std::byte*>(what.payload);
  std::byte* codes = scales + codes_offset(what.num_elems);
  BlockBuffers block;
  for (int64_t begin = 0; begin < what.num_elems; begin += kEncodedBlock) {
    const int64_t count = std::min(kEncodedBlock, what.num_elems - begin);
    read_block(what, begin, count, block.x);
    const float scale = encode_block(count, block);
    store(scales, begin / kEncodedBlock, scale);
    std::memcpy(codes + begin * kCodeBits / 8, block.codes,
                static_cast<size_t>((count * kCodeBits + 7) / 8));
    keep_block(what, begin, count, is_finite(scale), block.x, block.decoded);
  }
}

template <class Half>
void encode_halves(const ToEncode& what) {
  const auto* source = static_cast<const std::byte*>(what.source);
  auto* residual = static_cast<std::byte*>(what.residual);
  auto* payload = static_cast<std::byte*>(what.payload);
  if (residual == nullptr) {
    return for_each_index(what.num_elems, [=](int64_t i) {
      store(payload, i, rounded_to<Half>(load<float>(source, i)));
    });
  }
  for_each_index(what.num_elems, [=](int64_t i) {
    const auto before = load<float>(residual, i);
    const float x = load<float>(source, i) + before;
    const Half half = rounded_to<Half>(x);
    store(payload, i, half);
    store(residual, i, lacking(x, to_float(half), before));
  });
}

void encode_loop(const ToEncode& what) {
  if (what.encoding == DType::kBFloat16) return encode_halves<BFloat16>(what);
  if (what.encoding == DType::kFloat16) return encode_halves<Float16>(what);
  if (what.encoding == DType::kTopK) return encode_topk(what);
  if (what.encoding == DType::kInt8) {
    return encode_blocks<8>(what, [](int64_t, BlockBuffers& block) {
      const float scale = int8_scale(block.x);
      encode_int8_block(scale, block.x, reinterpret_cast<int8_t*>(block.codes), block.decoded);
      return scale;
    });
  }
  encode_blocks<1>(what, [](int64_t count, BlockBuffers& block) {
    const float scale = sign_scale(block.x, count);
    encode_sign_block(scale, block.x, reinterpret_cast<uint8_t*>(block.codes), block.decoded);
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
