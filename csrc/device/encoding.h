// Encodings on their way between a device and the host: made where the floats are, so that fewer bytes travel.
//
//   source + lacked ──encode──► payloads, together ──one copy──► host
//   value + change ◄──decode──── payloads, together ◄──one copy── host
//
// Few launches for all slices of a call, but for kTopK (kernels/batch_cuda.h). Bits: those of the host's kernels.
#pragma once

#include "device/device.h"

namespace psstore::device {

// A slice of what is pushed. It says source + lacked_scale * lacked; `lacking` becomes what the payload lacks of that,
// as ToEncode's residual does.
struct ToSend {
  DType encoding = DType::kInt8;  // or half precision
  int64_t num_elems = 0;
  int64_t num_kept = 0;           // k of kTopK; else not read
  const void* source = nullptr;   // (num_elems,) of `dtype`, of any alignment
  DType dtype = DType::kFloat32;  // or half precision
  const void* lacked = nullptr;   // (num_elems,) float32; null: nothing
  float lacked_scale = 1.0F;
  void* lacking = nullptr;  // (num_elems,) float32, other memory than `lacked`

  size_t payload_bytes() const {
    return encoded_bytes(encoding, static_cast<uint64_t>(num_elems),
                         static_cast<uint64_t>(num_kept));
  }
};

// The payloads to the host, one after the other. Throws Error(OUT_OF_MEMORY), with nothing done, where the queue has
// no room for them.
void encode_out(Queue& queue, void* to_host, std::span<const ToSend> slices);

// A slice of what is pulled, at `offset` of what has come: a change in kInt8 or kSign is added to the value, all else
// takes its place.
struct ToDecode {
  DType dtype = DType::kInt8;
  int64_t num_elems = 0;
  size_t offset = 0;
  void* value = nullptr;       // (num_elems,) of `to`
  DType to = DType::kFloat32;  // or half precision, where the other one comes; or `dtype`
};

// Of `num_bytes` that have come to the host. Throws as encode_out(). REQUIRES: the payloads are well formed.
void decode_in(Queue& queue, const void* from_host, size_t num_bytes,
               std::span<const ToDecode> slices);

// Floats of the device to where somebody wants them.
struct ToGiveOut {
  const void* floats = nullptr;
  int64_t num_elems = 0;
  void* to = nullptr;             // (num_elems,) of `dtype`, of any alignment
  DType dtype = DType::kFloat32;  // or half precision
};

void give_out(Queue& queue, std::span<const ToGiveOut> arrays);

}  // namespace psstore::device
