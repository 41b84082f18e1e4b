// Where the bytes of slots are, and who works on them: this process (host_backend.h) or a device
// (device_backend.h).
//
// A slot's memory is a buffer whose bytes only the backend can tell to be anything. Work is given to it in
// order, and for everybody who gives more it is as if it were done at once; a device has it done later.
// What begins no later than flush() may still be collected: one launch for many slices costs no more than
// one for one.
//
// Thread-safe: callers hold a stripe's lock, which orders what is done to one slot. No call waits for a
// device but those that say so.
// Errors: Error(OUT_OF_MEMORY) of what allocates, with nothing changed; Error(DEVICE_FAILED) of everything.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/buffer.h"
#include "device/device.h"
#include "kernels/codec.h"
#include "kernels/update.h"
#include "table/gather.h"

namespace psstore {

// A sum of squares: itself, or where it is going to be.
struct Sum {
  double value = 0;
  BufferRef buffer;  // a device's; empty: `value` is the sum
  size_t index = 0;  // in the buffer, of doubles
};

// What is read: pieces of host memory, to be looked at and sent once `ready` is done, or now without one.
struct Gathered {
  std::vector<Piece> pieces;
  device::FenceRef ready;
};

class Backend {
 public:
  virtual ~Backend() = default;

  // ---- memory

  // Of slots. Contents undefined. May wait for a device that is short of memory.
  virtual BufferRef allocate(size_t num_bytes) = 0;
  // Of rows and their index, which are read all over.
  virtual BufferRef allocate_rows(size_t num_bytes) { return allocate(num_bytes); }
  // As allocate(), as far as possible out of the `reserved_bytes` that the slot has left.
  virtual BufferRef allocate_reserved(size_t num_bytes, uint64_t& reserved_bytes) = 0;
  // Of the host, for a payload to be received into.
  virtual BufferRef allocate_payload(size_t num_bytes) = 0;
  // A received payload as the work below reads it: itself, or a copy that is on its way.
  virtual BufferRef bring(const BufferRef& payload) = 0;
  // Whether that payload is its own, and not memory that somebody shares.
  virtual bool owns(const BufferRef& payload) const = 0;
  // A range of what bring() returned as the memory of a slot from now on; empty: it is to be copied.
  virtual BufferRef keep(const BufferRef& payload, size_t offset, size_t num_bytes) = 0;

  // Throws Error(OUT_OF_MEMORY) that says what to do if slots of so many bytes more, rule state included,
  // would not fit.
  virtual void reserve(uint64_t num_bytes) = 0;
  virtual void unreserve(uint64_t num_bytes) = 0;
  // What has to be reserved for memory of so many bytes.
  virtual uint64_t footprint(size_t num_bytes) const = 0;
  // Whether memory counts by itself while it is in use, so that what was reserved for it is over then; else a slot's
  // reservation stays, and counts for what the slot has.
  virtual bool counts_use() const = 0;
  // What was reserved for a slot is there, in memory that was not allocated for it.
  virtual void draw(size_t num_bytes, uint64_t& reserved_bytes) = 0;
  // What is in use and reserved of what may be.
  virtual const MemoryBudget* budget() const = 0;

  // ---- work; pointers are into memory of the above

  virtual void zero(void* memory, size_t num_bytes) = 0;
  virtual void copy(void* to, const void* from, size_t num_bytes) = 0;
  virtual void convert(DType from, DType to, const void* source, void* destination,
                       int64_t num_elems) = 0;
  // What spans and pointers in `update` refer to on the host is read before the call returns.
  virtual void reduce_update(const SliceUpdate& update) = 0;
  virtual Sum reduced_squares(const SliceUpdate& update) = 0;
  // encode_change() of kernels/codec.h from `base`, which `what.base` is, or becomes a copy of. A device can't say yet
  // whether the payload says the change, and returns true: who reads it looks (table/published.h).
  virtual bool encode_change(const void* base, const ToEncode& what) = 0;
  // Lets what was collected begin, and takes note of what is done. After every call that gave work. What a device has no
  // memory to begin stays collected, and begins with what comes next, or fails that: nobody undoes what was collected.
  virtual void flush() = 0;

  // ---- reads

  virtual Gathered gather(const std::vector<Finding>& findings) = 0;
  // For a client that reads the pieces where they lie. They are in shared memory as far as there is some: see
  // offset_of().
  virtual Gathered lend(const std::vector<Finding>& findings) = 0;
  // Where it lies, as clients are told that share memory; nullopt if they can't see it.
  virtual std::optional<uint64_t> offset_of(const std::byte* data) const = 0;
  virtual Gathered gather_sums(const std::vector<Sum>& sums) = 0;
  // Waits for the device.
  virtual std::string bytes_of(const BufferRef& buffer, size_t num_bytes) = 0;

  // Whether work is done when its call returns, so that the call can tell what came of it.
  virtual bool works_at_once() const = 0;
  // Whether a slot keeps the memory of a value that was read when it was replaced, until the next change: then
  // values that are read are found in the same places.
  virtual bool keeps_places() const = 0;

  // "cpu", or the device's name.
  virtual const std::string& device() const = 0;

  // Bytes of memory for slots and payloads: all, and those of them that are kept for reuse.
  virtual size_t pool_bytes() const = 0;
  virtual size_t pool_idle_bytes() const = 0;
  // Gives the system back some of what is kept and was not needed since the last call: see BufferPool. A device
  // keeps all of it, whose memory is taken and given slowly and is nobody else's.
  virtual void free_unused(size_t max_bytes) = 0;
};

}  // namespace psstore
