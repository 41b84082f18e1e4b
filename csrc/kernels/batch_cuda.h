// The kernels of update.h and codec.h on a GPU: whole batches of slices, in stream order.
//
// Defined by the *_cuda.cu files where CMake builds with CUDA and by no_cuda.cc, which throws, where it does
// not; includes nothing of CUDA, so that its callers need not know which.
//
// Contract: every pointer that the device is to read or write is to memory that it can reach. Contributions,
// payloads and what is converted may have any alignment; value, state and shadow that of their elements.
// Streams are of the current device. Nothing here waits, allocates or synchronises: a call puts
// work into the stream and returns; what it was given must stay as it is until the stream has passed.
// Each launch is checked: throws Error(DEVICE_FAILED) with its reason, and Error(INTERNAL) before anything is
// launched if the caller broke what update.h and codec.h require.
//
// Bits: those of the CPU's kernels, all of them, but for the sign and the payload of a NaN: an x86 operation
// hands on the NaN that came in, a GPU's makes a new one. (A kSign block that holds a NaN has a NaN as its
// scale on both; the bits below it may differ.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/codec.h"
#include "kernels/pieces.h"
#include "kernels/update.h"

namespace psstore {

using CudaStream = struct CUstream_st*;

// Of the CUDA that the kernels were compiled with, as CUDART_VERSION: 13000 is 13.0. 0: none were.
extern const int kCudaVersion;

// Devices that can be used; 0 without a device, without a driver or without CUDA in the build.
int cuda_device_count();

// Where a batch's descriptors are written on the host, and where the kernel reads them: the call fills
// `pinned` and puts the copy into the stream. Both of at least `num_bytes`, aligned to 16, and with room for whole words
// of 16.
struct LaunchMemory {
  std::byte* pinned = nullptr;  // page-locked host memory, which a kernel reads
  std::byte* device = nullptr;
  size_t num_bytes = 0;
};

// Who launches gives it when a batch is planned, and its size known.
class LaunchMemorySource {
 public:
  virtual ~LaunchMemorySource() = default;
  // Of `num_bytes` at least, to stay as it is until the stream has passed the launch.
  virtual LaunchMemory take(size_t num_bytes) = 0;
};

// reduce_update() of each slice of the batch, which may mix rules, options and dtypes: one launch for each
// kind of kernel that the batch needs, whatever its number of slices. `hyper` and `contributions` are read
// before the call returns; `value_*`, `state`, `shadow` and the contributions' data are device memory.
// REQUIRES: the slices' outputs do not overlap.
void cuda_reduce_update_async(std::span<const SliceUpdate> batch, LaunchMemorySource& memory,
                              CudaStream stream);

// reduced_squares() of slice i to sums[i] (device memory).
void cuda_reduced_squares_async(std::span<const SliceUpdate> batch, double* sums,
                                LaunchMemorySource& memory, CudaStream stream);

// The pieces side by side in one launch: none of them reads or writes what another one writes. Any alignment.
void cuda_copy_pieces_async(std::span<const CopyPiece> pieces, LaunchMemorySource& memory,
                            CudaStream stream);

// convert() of update.h.
void cuda_convert_async(DType from, DType to, const void* source, void* destination,
                        int64_t num_elems, CudaStream stream);

// all_finite() of update.h and of codec.h, but the answer is left on the device: `*flag` becomes 1 if an
// element is NaN or an infinity, and else stays as it is. So several may share a flag; zero it before.
void cuda_all_finite_async(DType dtype, const void* data, int64_t num_elems, uint32_t* flag,
                           CudaStream stream);
void cuda_all_finite_async(const Encoded& encoded, uint32_t* flag, CudaStream stream);

// encode() of codec.h, of slices side by side: one launch for all but those of kTopK, which take ten each.
// `scratch`: device memory of cuda_encode_scratch_bytes(), aligned to 16; null if 0.
size_t cuda_encode_scratch_bytes(std::span<const ToEncode> batch);
void cuda_encode_async(std::span<const ToEncode> batch, std::byte* scratch,
                       LaunchMemorySource& memory, CudaStream stream);

// encode_change() of codec.h, of slices side by side: two launches.
void cuda_encode_changes_async(std::span<const ToEncode> batch, LaunchMemorySource& memory,
                               CudaStream stream);

// decode() of codec.h. That a payload is_well_formed() must have been asked where the host can read it.
void cuda_decode_async(const Encoded& encoded, void* destination, CudaStream stream);

}  // namespace psstore
