// Encoding a slice.
//
// How a block is encoded, and how its large elements are found, is `Encoders`: ElementEncoders, or what an instruction
// set has of its own.
//
// Included only by the .cc file of each instruction set: see loops.h for why everything is in an unnamed namespace.
#pragma once

#include "kernels/codec_blocks.h"
#include "kernels/codec_feedback.h"
#include "kernels/codec_topk.h"
#include "kernels/convert.h"

namespace psstore {
namespace {

struct ElementEncoders {
  using Conversions = ElementConversions;

  // The block from `begin` on, all of it.
  template <class Code, class Feedback>
  static void encode_whole(const BlockPayload& payload, const Feedback& feedback, int64_t begin) {
    encode_block<Code>(payload, feedback, begin, kEncodedBlock);
  }

  // The elements from `begin` on.
  template <class Half>
  static void encode_halves(const ResidualFeedback& feedback, std::byte* payload, int64_t begin,
                            int64_t count) {
    for_each_index(count, [=](int64_t offset) {
      const int64_t i = begin + offset;
      const auto before = load_at<float>(feedback.residual, i);
      const auto x = feedback.meant<float>(i);
      const Half half = rounded_to<Half>(x);
      store(payload, i, half);
      store_at(feedback.residual, i, lacking(x, to_float(half), before));
    });
  }

  // Which of the kChunk elements from `begin` on have a magnitude of `low` or more, a bit for each.
  template <class At>
  static uint32_t reaching(At at, int64_t begin, uint32_t low) {
    return passing(at, begin, kChunk, [=](uint32_t magnitude) { return magnitude >= low; });
  }
};

template <class Encoders, class Code>
void encode_blocks(const ToEncode& what) {
  auto* const scales = static_cast<std::byte*>(what.payload);
  const BlockPayload payload{scales, scales + codes_offset(what.num_elems)};
  with_feedback(what, [&](auto feedback) {
    const int64_t rest = what.num_elems % kEncodedBlock;
    const int64_t end = what.num_elems - rest;
    for (int64_t begin = 0; begin < end; begin += kEncodedBlock) {
      Encoders::template encode_whole<Code>(payload, feedback, begin);
    }
    if (rest > 0) encode_block<Code>(payload, feedback, end, rest);
  });
}

template <class Encoders, class Half>
void encode_halves(const ToEncode& what) {
  if (what.residual == nullptr) {
    return convert_loop<typename Encoders::Conversions>(DType::kFloat32, what.encoding, what.source,
                                                        what.payload, what.num_elems);
  }
  Encoders::template encode_halves<Half>(ResidualFeedback{what.source, what.residual},
                                         static_cast<std::byte*>(what.payload), 0, what.num_elems);
}

template <class Encoders>
void encode_loop(const ToEncode& what) {
  switch (what.encoding) {
    case DType::kBFloat16: return encode_halves<Encoders, BFloat16>(what);
    case DType::kFloat16: return encode_halves<Encoders, Float16>(what);
    case DType::kInt8: return encode_blocks<Encoders, Int8Code>(what);
    case DType::kSign: return encode_blocks<Encoders, SignCode>(what);
    case DType::kTopK: return encode_topk<Encoders>(what);
    case DType::kFloat32:
    case DType::kFloat64: return;  // not encoded
  }
}

}  // namespace
}  // namespace psstore
