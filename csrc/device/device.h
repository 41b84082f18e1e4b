// A device as a shard and a worker see it: memory, queues of work, and fences to tell when that is done.
//
// What is queued runs later, and the host goes on: nothing here waits but what says so.
//
//   ingest   ──copy_in──copy_in──●F                    ●F  fence: all queued before it is done
//   compute                       └─►wait_for(F)──reduce_update──●G
//   read                                                         └─►wait_for(G)──copy_out──●H
//
// A queue does its work in order. Queues know nothing of each other: whoever reads on one what is written on
// another, or writes what is read there, says wait_for() first; whoever uses memory again, be it the
// host's or the device's, has seen a fence that is after its last use.
//
// Two kinds: "cuda:0" (cuda_device_cuda.cu) and "fake:0" (fake_device.h), which is host memory and does
// every piece of work as late, or as early, as the fences allow, so that a wait that is missing shows as
// wrong bytes in tests that need no GPU. Neither is CUDA's to those who include this.
//
// Thread safety: every call of a Device; those of one Queue by one thread at a time; a Fence by all.
// Errors: Error(DEVICE_FAILED) that names the device and its reason, from then on at every call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "core/buffer.h"
#include "kernels/codec.h"
#include "kernels/pieces.h"
#include "kernels/update.h"

namespace psstore::device {

// A place in a queue.
class Fence {
 public:
  virtual ~Fence() = default;
  // Whether all that was queued before it is done. Does not wait.
  virtual bool done() = 0;
  // Waits until it is. Blocks the host: call it without locks and without the GIL.
  virtual void wait() = 0;
};
using FenceRef = std::shared_ptr<Fence>;

// Work in order. Pointers are to memory of the device but for what says host; all of it stays as it is
// until a fence after the call is done. What the arguments themselves refer to (spans, hyper-parameters) is
// read before the call returns.
class Queue {
 public:
  virtual ~Queue() = default;

  virtual FenceRef record() = 0;
  // What is queued from here on runs after `fence`, which may be of another queue of any device.
  virtual void wait_for(const FenceRef& fence) = 0;

  // From the host and to it. Host memory of allocate_pinned(): with any other the call may block.
  virtual void copy_in(void* to, const void* from_host, size_t num_bytes) = 0;
  virtual void copy_out(void* to_host, const void* from, size_t num_bytes) = 0;
  virtual void copy(void* to, const void* from, size_t num_bytes) = 0;
  // Side by side: none of the pieces reads or writes what another one writes. One launch, however many they
  // are; to and from the host: device/pieces.h.
  virtual void copy_pieces(std::span<const CopyPiece> pieces) = 0;
  virtual void zero(void* to, size_t num_bytes) = 0;

  // As kernels/update.h, all slices of a batch side by side: none of them reads or writes what another one
  // writes.
  virtual void reduce_update(std::span<const SliceUpdate> updates) = 0;
  // `sums`: one double each, on the device.
  virtual void reduced_squares(std::span<const SliceUpdate> updates, double* sums) = 0;
  virtual void convert(DType from, DType to, const void* source, void* destination,
                       int64_t num_elems) = 0;

  // As kernels/codec.h. Slices side by side, as above.
  virtual void encode(std::span<const ToEncode> slices) = 0;
  // encode_change() likewise; whether a payload says its change is for whoever reads it to see.
  virtual void encode_changes(std::span<const ToEncode> slices) = 0;
  virtual void decode(const Encoded& encoded, void* destination) = 0;

  // Memory of the queue's own, contents undefined, for what is queued from here to the next call. Null: there
  // is none left.
  virtual std::byte* scratch(size_t num_bytes) = 0;

  // Its number, as __cuda_array_interface__ and DLPack name streams: the CUstream of a GPU's.
  virtual uint64_t stream() const = 0;
};

struct MemoryInfo {
  size_t free_bytes = 0;
  size_t total_bytes = 0;
};

class Device {
 public:
  virtual ~Device() = default;

  // As it was opened: "cuda:0".
  virtual const std::string& name() const = 0;
  virtual MemoryInfo memory() const = 0;

  // nullptr if there is none left. Contents undefined; aligned to kBufferAlignment at least. Slow, and may
  // wait for all that the device is doing, as does free: for pools (device/memory.h), not for every use.
  virtual std::byte* allocate(size_t num_bytes) = 0;
  virtual void free(std::byte* memory) noexcept = 0;
  // Host memory that the device copies from and to without the host.
  virtual std::byte* allocate_pinned(size_t num_bytes) = 0;
  virtual void free_pinned(std::byte* memory) noexcept = 0;

  // ---- memory that processes of one machine share. Fences do not reach from one to the other: who tells the
  // other process that something is there, has waited for it.

  // Which piece of hardware it is: the same text in every process, by whatever number each opens it.
  virtual std::string identity() const = 0;
  // What another process needs to import a block that allocate() returned. It is freed after its imports have
  // ended, or the exporting process has. Throws Error(BAD_ARGUMENT) with the reason if it can't be exported.
  virtual std::string export_block(const std::byte* block) = 0;
  // Another process's block: memory of this device like any other, but for end_import() in place of free().
  // Throws Error(BAD_ARGUMENT) with the reason if it can't be imported.
  virtual std::byte* import_block(const std::string& handle) = 0;
  virtual void end_import(std::byte* block) noexcept = 0;

  // Keeps the device alive. Its destructor waits until its work is done.
  virtual std::unique_ptr<Queue> make_queue() = 0;
  // Stands for a stream of somebody else, by its number: what is queued here goes there. It is not waited for.
  virtual std::unique_ptr<Queue> borrow_queue(uint64_t stream) = 0;
};

// "cuda:N", or "fake:N" with options as fake_device.h has them.
// Throws Error(BAD_ARGUMENT) that says what there is.
std::shared_ptr<Device> open_device(const std::string& name);

// Which of CUDA's devices the memory is of. Throws Error(BAD_ARGUMENT) if it is of none.
int cuda_device_of(const void* memory);

// What open_device() asks for "cuda:N": cuda_device_cuda.cu, or no_cuda.cc in a build without CUDA.
std::shared_ptr<Device> open_cuda_device(const std::string& name, int index);

}  // namespace psstore::device
