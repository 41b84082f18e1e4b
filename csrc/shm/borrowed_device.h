// A client's side of the memory of a device that one shard shares (device/device_arena.h): the blocks in which
// the shard's values lie, and the arena there that the client pushes through. They are imported from the
// shard's process, or simply there if that is the client's own.
//
// By convention a client reads values and writes to rooms of its own: nothing keeps it from the rest.
// Copies are queued, and nothing here waits: blocks, arena and rooms are to be kept until they are done.
//
// Thread-safe, but for queues, which are for one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>

#include "core/mutex.h"
#include "core/types.h"
#include "device/device.h"
#include "device/device_arena.h"
#include "shm/push_rooms.h"

namespace psstore {

// Memory of a device.
struct DeviceRange {
  std::byte* data;
  size_t num_bytes;
};

// What was imported of a shard, until the object goes.
class BorrowedDevice {
 public:
  explicit BorrowedDevice(std::shared_ptr<device::Device> device) : device_(std::move(device)) {}
  BorrowedDevice(const BorrowedDevice&) = delete;
  BorrowedDevice& operator=(const BorrowedDevice&) = delete;
  ~BorrowedDevice();

  // Does nothing if it is there already. Throws Error(BAD_ARGUMENT) with the reason if it can't be imported.
  void add_block(uint64_t address, size_t num_bytes, const std::string& handle);
  // Of a shard of this very process, which can't import what it has exported itself.
  void add_own_block(std::shared_ptr<device::SharedBlock> block);
  // Throws Error(BAD_HEADER) if it is not within a block.
  std::byte* at(uint64_t address, size_t num_bytes) const;
  // Queues copies of the entries that have bytes to their targets. Throws Error(BAD_HEADER) if targets have
  // other sizes than the entries, or one lies outside: then nothing is copied.
  void read(device::Queue& queue, std::span<const SliceEntry> entries,
            std::span<const DeviceRange> targets) const;

 private:
  struct Block {
    std::byte* data;
    size_t num_bytes;
    std::shared_ptr<device::SharedBlock> own;  // null: imported
  };

  const std::shared_ptr<device::Device> device_;
  mutable Mutex mutex_;
  std::map<uint64_t, Block> blocks_ GUARDED_BY(mutex_);  // by address
};

class PushRoom;

// A push arena on a device.
class DevicePushes : public std::enable_shared_from_this<DevicePushes> {
 public:
  // Throws Error(BAD_HEADER), std::system_error, std::invalid_argument.
  DevicePushes(std::shared_ptr<BorrowedDevice> blocks, int control_fd, uint64_t address,
               size_t num_bytes);

  size_t num_bytes() const { return num_bytes_; }
  // Null: there is no room.
  std::unique_ptr<PushRoom> take(size_t num_bytes);

 private:
  friend class PushRoom;

  const std::shared_ptr<BorrowedDevice> blocks_;
  std::byte* const data_;
  const uint64_t address_;
  const size_t num_bytes_;
  Mutex mutex_;
  PushRooms rooms_ GUARDED_BY(mutex_);
};

// Where one frame's payload lies. Free again with the object, if it was not sent.
class PushRoom {
 public:
  PushRoom(std::shared_ptr<DevicePushes> pushes, size_t first_block, size_t num_bytes)
      : pushes_(std::move(pushes)), first_block_(first_block), num_bytes_(num_bytes) {}
  PushRoom(const PushRoom&) = delete;
  PushRoom& operator=(const PushRoom&) = delete;
  ~PushRoom();

  size_t num_bytes() const { return num_bytes_; }
  // Queues copies of the sources, one after the other. Throws Error(BAD_ARGUMENT) if they are not of its size.
  void write(device::Queue& queue, std::span<const DeviceRange> sources);
  // The frame `number` says where it is: at the address that it returns.
  uint64_t send(uint64_t number);

 private:
  const std::shared_ptr<DevicePushes> pushes_;
  const size_t first_block_;
  const size_t num_bytes_;
  bool sent_ = false;
};

}  // namespace psstore
