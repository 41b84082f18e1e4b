// Slots in the memory of a device. Three queues, so that copies both ways and arithmetic overlap:
//
//   ingest   payload ──► device                    waits for nothing: it fills memory that nobody uses
//   compute      └─F──► reduce, update, convert    after the uploads so far
//   read                    └─F──► host            after the arithmetic so far
//
// Memory of the device is written by compute alone, but for fresh copies of payloads. Readers hold what
// they read until it is read, so that a step goes out of place meanwhile, as it does on the host. What is
// still needed by something that was queued is held here until a fence has passed: a payload until it is on
// the device, what a read copies from and to until it is there, and what nobody refers to any more until
// all is done that was queued before (table/device_memory.h).
//
// Steps, sums of squares and changes to be told are collected until flush(), or until something else needs what they
// write: one launch each for all slots that are ready in one call, or a few.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "core/mutex.h"
#include "table/backend.h"
#include "table/device_memory.h"

namespace psstore {

// Updates that wait for their launch, with all that they refer to on the host.
class UpdateRun {
 public:
  void add(const SliceUpdate& update);
  size_t size() const { return updates_.size(); }
  // Valid until the next add() or clear().
  std::span<const SliceUpdate> batch();
  void clear();

 private:
  std::vector<SliceUpdate> updates_;
  std::vector<Contribution> contributions_;
  std::vector<Hyper> hypers_;
};

// Changes of values that wait for their launches, which come after those of the updates: copies of what they are added
// to, then all of them.
class ChangeRun {
 public:
  void add(const void* base, const ToEncode& what);
  bool empty() const { return changes_.empty(); }
  // Whether one of them changes that memory, or reads it, and so would have to come first.
  bool writes(const void* memory) const { return written_.contains(memory); }
  bool reads(const void* memory) const { return read_.contains(memory); }
  void queue_to(device::Queue& queue) const;
  void clear();

 private:
  std::vector<CopyPiece> copies_;
  std::vector<ToEncode> changes_;
  std::unordered_set<const void*> written_;
  std::unordered_set<const void*> read_;
};

class DeviceBackend final : public Backend {
 public:
  // `num_sharing`: how many shards share the device, this one included: each may use so much of its memory.
  // `host`: what payloads and replies are taken from; null: there is no limit.
  explicit DeviceBackend(std::shared_ptr<device::Device> device, size_t num_sharing = 1,
                         std::shared_ptr<MemoryBudget> host = nullptr);
  // Waits until everything is done.
  ~DeviceBackend() override;
  DeviceBackend(const DeviceBackend&) = delete;
  DeviceBackend& operator=(const DeviceBackend&) = delete;

  BufferRef allocate(size_t num_bytes) override;
  BufferRef allocate_reserved(size_t num_bytes, uint64_t&) override { return allocate(num_bytes); }
  BufferRef allocate_payload(size_t num_bytes) override;
  BufferRef bring(const BufferRef& payload) override;
  bool owns(const BufferRef&) const override { return true; }  // it has no standby
  BufferRef keep(const BufferRef&, size_t, size_t) override { return {}; }
  void reserve(uint64_t num_bytes) override { slots_.take(num_bytes); }
  void unreserve(uint64_t num_bytes) override { slots_.give_back(num_bytes); }
  uint64_t footprint(size_t num_bytes) const override { return num_bytes; }
  bool counts_use() const override { return false; }
  void draw(size_t, uint64_t&) override {}
  const MemoryBudget* budget() const override { return &slots_; }

  void zero(void* memory, size_t num_bytes) override;
  void copy(void* to, const void* from, size_t num_bytes) override;
  void convert(DType from, DType to, const void* source, void* destination,
               int64_t num_elems) override;
  void reduce_update(const SliceUpdate& update) override;
  Sum reduced_squares(const SliceUpdate& update) override;
  bool encode_change(const void* base, const ToEncode& what) override;
  void flush() override;

  Gathered gather(const std::vector<Finding>& findings) override;
  // `ready` is done when the pieces may be read, by whatever process.
  Gathered lend(const std::vector<Finding>& findings) override;
  std::optional<uint64_t> offset_of(const std::byte* data) const override {
    return memory_->arena().offset_of(data);
  }
  Gathered gather_sums(const std::vector<Sum>& sums) override;
  std::string bytes_of(const BufferRef& buffer, size_t num_bytes) override;
  bool works_at_once() const override { return false; }
  bool keeps_places() const override { return false; }
  const std::string& device() const override { return device_->name(); }

  // ---- for clients of the same process, which need not wait on the host

  // What is given to it from here on is done after `fence`.
  void work_after(const device::FenceRef& fence);
  // What was given to it by now, and all that it refers to.
  device::FenceRef work_so_far();

  // ---- for processes that have the device, too

  std::string identity() const { return device_->identity(); }
  std::vector<std::shared_ptr<device::SharedBlock>> blocks_after(uint64_t number) const {
    return memory_->arena().blocks_after(number);
  }

  size_t pool_bytes() const override { return memory_->pool_bytes(); }
  size_t pool_idle_bytes() const override { return memory_->pool_idle_bytes(); }
  void free_unused(size_t) override {}

 private:
  // Buffers that are needed until fences have passed.
  struct Held {
    std::vector<device::FenceRef> until;
    std::vector<BufferRef> buffers;
  };
  using HeldInOrder = std::deque<Held>;
  // What is to be read: bytes of the device, one range after the other on the host.
  struct Range {
    BufferRef buffer;
    size_t offset = 0;
    size_t num_bytes = 0;
  };

  BufferRef take(size_t num_bytes) REQUIRES(mutex_);
  // Waits until nothing is held, what is released now included, and gives idle memory back.
  void reclaim() REQUIRES(mutex_);
  void free_held() REQUIRES(mutex_);
  // Queues work that takes memory of the device beside what it is given, as a launch does for its table: once more, with
  // free_held() first, if there is none.
  template <typename Work>
  void with_room(Work work) REQUIRES(mutex_);
  void let_go(HeldInOrder& held, bool wait) REQUIRES(mutex_);
  // REQUIRES: launch(), or what was collected could come after the fence.
  void hold_released() REQUIRES(mutex_);
  // The queue of all arithmetic, with what was collected in it, and after the uploads so far.
  device::Queue& compute() REQUIRES(mutex_);
  // What was queued before a failure is collected no more.
  void launch() REQUIRES(mutex_);
  void queue_collected() REQUIRES(mutex_);
  void after_uploads() REQUIRES(mutex_);
  // Of each.
  std::vector<BufferRef> bytes_wanted(const std::vector<Finding>& findings) REQUIRES(mutex_);
  Gathered read(std::vector<Range> ranges) REQUIRES(mutex_);

  const std::shared_ptr<device::Device> device_;
  const std::shared_ptr<DeviceMemory> memory_;
  // Not under the lock: what is let go of under it may end a reservation.
  MemoryBudget slots_;

  Mutex mutex_;
  const std::unique_ptr<device::Queue> ingest_ GUARDED_BY(mutex_);
  const std::unique_ptr<device::Queue> compute_ GUARDED_BY(mutex_);
  const std::unique_ptr<device::Queue> read_ GUARDED_BY(mutex_);
  device::FenceRef uploaded_ GUARDED_BY(mutex_);   // after the last upload
  bool upload_is_new_ GUARDED_BY(mutex_) = false;  // compute does not wait for it yet
  UpdateRun updates_ GUARDED_BY(mutex_);
  std::unordered_set<const void*> written_ GUARDED_BY(mutex_);  // by updates_
  ChangeRun changes_ GUARDED_BY(mutex_);
  UpdateRun squares_ GUARDED_BY(mutex_);
  BufferRef sums_ GUARDED_BY(mutex_);  // where squares_ go
  HeldInOrder uploading_ GUARDED_BY(mutex_);
  HeldInOrder reading_ GUARDED_BY(mutex_);
  HeldInOrder released_ GUARDED_BY(mutex_);
};

}  // namespace psstore
