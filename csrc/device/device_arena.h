// Memory of a device in few large blocks, which other processes can import: where a shard's values lie, and
// what is pushed to it from the same device.
//
//   blocks      [  0: 2 MiB  ]   [  1: 2 MiB  ]   [    2: 4 MiB    ]  …   each twice what there was, to 256 MiB
//   addresses   0                4                8                      …   bytes that both sides mean the same by
//
// A block is exported as a whole, so that what it holds is named by an address in a space of its own: the
// blocks one after the other, with gaps, so that no range goes over from one to the next. Addresses are never
// used twice.
//
// Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/buffer.h"
#include "core/holes.h"
#include "core/mutex.h"
#include "device/device.h"

namespace psstore::device {

// A block, given back to the device with the last reference: whoever has told another process of it holds one.
class SharedBlock {
 public:
  // Takes over `data`, which is of the device.
  SharedBlock(std::shared_ptr<Device> device, std::byte* data, size_t num_bytes, uint64_t number,
              uint64_t address);
  SharedBlock(const SharedBlock&) = delete;
  SharedBlock& operator=(const SharedBlock&) = delete;
  ~SharedBlock();

  std::byte* data() const { return data_; }
  size_t num_bytes() const { return num_bytes_; }
  // From 1 on, in the order in which they were made.
  uint64_t number() const { return number_; }
  uint64_t address() const { return address_; }
  // For Device::import_block() elsewhere. Throws what export_block() throws.
  std::string handle() const { return device_->export_block(data_); }

 private:
  const std::shared_ptr<Device> device_;
  std::byte* const data_;
  const size_t num_bytes_;
  const uint64_t number_;
  const uint64_t address_;
};

class DeviceArena : public SharedSource {
 public:
  explicit DeviceArena(std::shared_ptr<Device> device) : device_(std::move(device)) {}

  // First fit. Of a device that failed there is none: what is queued next says why.
  std::byte* take(size_t num_bytes) noexcept override;
  void give_back(std::byte* range, size_t num_bytes) noexcept override;
  std::optional<uint64_t> offset_of(const std::byte* data) const override;

  // Gives the blocks back that hold nothing and that nobody was told of.
  void trim() noexcept;
  // Those with larger numbers, in their order.
  std::vector<std::shared_ptr<SharedBlock>> blocks_after(uint64_t number) const;

 private:
  using Blocks = std::map<const std::byte*, std::shared_ptr<SharedBlock>>;  // by first byte

  std::byte* take_hole(size_t size) REQUIRES(mutex_);
  bool add_block(size_t size) REQUIRES(mutex_);
  const SharedBlock* block_of(const std::byte* data) const REQUIRES(mutex_);
  const SharedBlock* block_at(uint64_t address) const REQUIRES(mutex_);

  const std::shared_ptr<Device> device_;
  mutable Mutex mutex_;
  Blocks blocks_ GUARDED_BY(mutex_);
  std::map<uint64_t, const SharedBlock*> by_address_ GUARDED_BY(mutex_);
  Holes holes_ GUARDED_BY(mutex_);  // by address
  size_t total_bytes_ GUARDED_BY(mutex_) = 0;
  uint64_t next_address_ GUARDED_BY(mutex_) = 0;
  uint64_t last_number_ GUARDED_BY(mutex_) = 0;
};

}  // namespace psstore::device
