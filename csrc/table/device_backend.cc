#include "table/device_backend.h"

#include <algorithm>
#include <utility>

#include "device/pieces.h"

namespace psstore {
namespace {

using device::FenceRef;

// Of a device's free memory, for slots: the rest is for payloads on their way, for values that readers hold
// while steps go on, and for what the device itself needs.
constexpr double kSlotsShare = 0.8;

// Sums that share a buffer: those of one launch, mostly. A NORM asks for some thousands at most.
constexpr size_t kSumsPerBuffer = 1024;

}  // namespace

// ---- collected updates ------------------------------------------------------------------------------

void UpdateRun::add(const SliceUpdate& update) {
  contributions_.insert(contributions_.end(), update.contributions.begin(),
                        update.contributions.end());
  hypers_.push_back(update.hyper != nullptr ? *update.hyper : Hyper{});
  updates_.push_back(update);
}

std::span<const SliceUpdate> UpdateRun::batch() {
  const Contribution* next = contributions_.data();
  for (size_t i = 0; i < updates_.size(); ++i) {
    const size_t count = updates_[i].contributions.size();
    updates_[i].contributions = {next, count};
    updates_[i].hyper = &hypers_[i];
    next += count;
  }
  return updates_;
}

void UpdateRun::clear() {
  updates_.clear();
  contributions_.clear();
  hypers_.clear();
}

void ChangeRun::add(const void* base, const ToEncode& what) {
  if (what.base != base && what.num_elems > 0) {
    copies_.push_back({static_cast<std::byte*>(what.base), static_cast<const std::byte*>(base),
                       static_cast<size_t>(what.num_elems) * sizeof(float)});
  }
  changes_.push_back(what);
  written_.insert(what.base);
  read_.insert({base, what.source});
}

void ChangeRun::queue_to(device::Queue& queue) const {
  queue.copy_pieces(copies_);
  queue.encode_changes(changes_);
}

void ChangeRun::clear() {
  copies_.clear();
  changes_.clear();
  written_.clear();
  read_.clear();
}

// ---- memory -----------------------------------------------------------------------------------------

DeviceBackend::DeviceBackend(std::shared_ptr<device::Device> device, size_t num_sharing,
                             std::shared_ptr<MemoryBudget> host)
    : device_(std::move(device)),
      memory_(std::make_shared<DeviceMemory>(device_, std::move(host))),
      slots_(
          static_cast<uint64_t>(static_cast<double>(device_->memory().free_bytes) * kSlotsShare) /
              num_sharing,
          "device " + device_->name(), "use more shards on more devices, or --device cpu"),
      ingest_(device_->make_queue()),
      compute_(device_->make_queue()),
      read_(device_->make_queue()) {}

DeviceBackend::~DeviceBackend() {
  const MutexLock lock(mutex_);
  try {
    for (HeldInOrder* held : {&uploading_, &reading_, &released_}) let_go(*held, true);
  } catch (const Error&) {  // it failed, as was said where somebody asked for something
  }
}

BufferRef DeviceBackend::allocate(size_t num_bytes) {
  const MutexLock lock(mutex_);
  return take(num_bytes);
}

BufferRef DeviceBackend::take(size_t num_bytes) {
  BufferRef block = memory_->allocate(num_bytes);
  if (block) return block;
  reclaim();
  block = memory_->allocate(num_bytes);
  if (block) return block;
  const device::MemoryInfo info = device_->memory();
  throw Error(ErrorCode::OUT_OF_MEMORY,
              "device " + device_->name() + " has no " + std::to_string(num_bytes) +
                  " bytes left (" + in_mib(info.free_bytes) + " of " + in_mib(info.total_bytes) +
                  " are free, in pieces); use more shards on more devices, or fewer workers' "
                  "gradients at a time");
}

void DeviceBackend::reclaim() {
  launch();
  let_go(uploading_, true);
  let_go(reading_, true);
  hold_released();
  free_held();
}

void DeviceBackend::free_held() {
  for (HeldInOrder* held : {&uploading_, &reading_, &released_}) let_go(*held, true);
  memory_->give_idle_back();
}

template <typename Work>
void DeviceBackend::with_room(Work work) {
  try {
    work();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::OUT_OF_MEMORY) throw;
    free_held();
    work();
  }
}

void DeviceBackend::let_go(HeldInOrder& held, bool wait) {
  while (!held.empty()) {
    for (const FenceRef& fence : held.front().until) {
      if (wait) fence->wait();
      if (!wait && !fence->done()) return;
    }
    held.pop_front();
  }
}

void DeviceBackend::hold_released() {
  std::vector<BufferRef> blocks = memory_->take_released();
  if (blocks.empty()) return;
  Held held{{compute_->record()}, std::move(blocks)};
  if (uploaded_) held.until.push_back(uploaded_);
  released_.push_back(std::move(held));
}

BufferRef DeviceBackend::allocate_payload(size_t num_bytes) {
  return memory_->pinned()->allocate(num_bytes);
}

BufferRef DeviceBackend::bring(const BufferRef& payload) {
  const MutexLock lock(mutex_);
  // Its client has put it on the device. It is let go of like what was copied there.
  if (offset_of(payload->data())) return memory_->lease(payload);
  BufferRef block = take(payload->size());
  ingest_->copy_in(block->data(), payload->data(), payload->size());
  uploaded_ = ingest_->record();
  upload_is_new_ = true;
  uploading_.push_back({{uploaded_}, {payload}});
  return block;
}

// ---- work -------------------------------------------------------------------------------------------

device::Queue& DeviceBackend::compute() {
  launch();
  after_uploads();
  return *compute_;
}

void DeviceBackend::after_uploads() {
  if (!std::exchange(upload_is_new_, false)) return;
  compute_->wait_for(uploaded_);
}

void DeviceBackend::launch() {
  if (squares_.size() + updates_.size() == 0 && changes_.empty()) return;
  after_uploads();
  with_room([this]() REQUIRES(mutex_) { queue_collected(); });
}

// Sums may come before the updates or after them: they read contributions, and nothing writes those.
void DeviceBackend::queue_collected() {
  if (squares_.size() > 0) {
    compute_->reduced_squares(squares_.batch(), reinterpret_cast<double*>(sums_->data()));
    squares_.clear();
    sums_ = {};
  }
  if (updates_.size() > 0) {
    compute_->reduce_update(updates_.batch());
    updates_.clear();
    written_.clear();
  }
  if (!changes_.empty()) {
    changes_.queue_to(*compute_);
    changes_.clear();
  }
}

void DeviceBackend::zero(void* memory, size_t num_bytes) {
  const MutexLock lock(mutex_);
  compute().zero(memory, num_bytes);
}

void DeviceBackend::copy(void* to, const void* from, size_t num_bytes) {
  const MutexLock lock(mutex_);
  compute().copy(to, from, num_bytes);
}

void DeviceBackend::convert(DType from, DType to, const void* source, void* destination,
                            int64_t num_elems) {
  const MutexLock lock(mutex_);
  compute().convert(from, to, source, destination, num_elems);
}

void DeviceBackend::reduce_update(const SliceUpdate& update) {
  const MutexLock lock(mutex_);
  // Slices of a batch run side by side: the second update of a slot is for the next one, as is that of a value whose
  // change is still to be told.
  if (written_.contains(update.value_in) || changes_.reads(update.value_out)) launch();
  updates_.add(update);
  written_.insert(update.value_out);
}

Sum DeviceBackend::reduced_squares(const SliceUpdate& update) {
  const MutexLock lock(mutex_);
  if (squares_.size() == kSumsPerBuffer) launch();
  if (!sums_) sums_ = take(kSumsPerBuffer * sizeof(double));
  const size_t index = squares_.size();
  squares_.add(update);
  return {0, sums_, index};
}

bool DeviceBackend::encode_change(const void* base, const ToEncode& what) {
  const MutexLock lock(mutex_);
  if (changes_.writes(base) || changes_.writes(what.source)) launch();
  changes_.add(base, what);
  return true;
}

void DeviceBackend::flush() {
  const MutexLock lock(mutex_);
  bool is_launched = true;
  try {
    launch();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::OUT_OF_MEMORY) throw;
    is_launched = false;
  }
  for (HeldInOrder* held : {&uploading_, &reading_}) let_go(*held, false);
  if (is_launched) hold_released();
  let_go(released_, false);
}

void DeviceBackend::work_after(const FenceRef& fence) {
  const MutexLock lock(mutex_);
  compute_->wait_for(fence);
}

FenceRef DeviceBackend::work_so_far() {
  const MutexLock lock(mutex_);
  launch();
  hold_released();  // so that flush() finds all of that free when the fence is done
  return compute_->record();
}

// ---- reads ------------------------------------------------------------------------------------------

std::vector<BufferRef> DeviceBackend::bytes_wanted(const std::vector<Finding>& findings) {
  std::vector<BufferRef> wanted;
  std::vector<ToEncode> halves;  // float32 that travels in half precision: one launch for all
  wanted.reserve(findings.size());
  for (const Finding& finding : findings) {
    if (finding.dtype == finding.wanted) {
      wanted.push_back(finding.value);
      continue;
    }
    wanted.push_back(take(finding.num_bytes));
    halves.push_back({.encoding = finding.wanted,
                      .source = finding.value->data(),
                      .num_elems = static_cast<int64_t>(finding.num_elems),
                      .payload = wanted.back()->data()});
  }
  if (halves.empty()) return wanted;
  device::Queue& queue = compute();
  with_room([&] { queue.encode(halves); });
  return wanted;
}

Gathered DeviceBackend::gather(const std::vector<Finding>& findings) {
  const MutexLock lock(mutex_);
  std::vector<Range> ranges;
  ranges.reserve(findings.size());
  for (BufferRef& bytes : bytes_wanted(findings)) {
    ranges.push_back({std::move(bytes), 0, findings[ranges.size()].num_bytes});
  }
  return read(std::move(ranges));
}

Gathered DeviceBackend::lend(const std::vector<Finding>& findings) {
  const MutexLock lock(mutex_);
  std::vector<BufferRef> wanted = bytes_wanted(findings);
  std::vector<Piece> pieces;
  pieces.reserve(findings.size());
  for (size_t i = 0; i < findings.size(); ++i) {
    const size_t num_bytes = findings[i].num_bytes;
    if (num_bytes > 0) pieces.push_back({std::move(wanted[i]), num_bytes});
  }
  launch();
  hold_released();  // before `ready`: when the client hears of its values, its pushes' memory is free again
  return {std::move(pieces), compute_->record()};
}

// Sums of one launch lie side by side: one copy for all of them.
Gathered DeviceBackend::gather_sums(const std::vector<Sum>& sums) {
  const MutexLock lock(mutex_);
  std::vector<Range> ranges;
  for (const Sum& sum : sums) {
    const size_t offset = sum.index * sizeof(double);
    if (!ranges.empty() && ranges.back().buffer.get() == sum.buffer.get() &&
        ranges.back().offset + ranges.back().num_bytes == offset) {
      ranges.back().num_bytes += sizeof(double);
    } else {
      ranges.push_back({sum.buffer, offset, sizeof(double)});
    }
  }
  return read(std::move(ranges));
}

Gathered DeviceBackend::read(std::vector<Range> ranges) {
  size_t total = 0;
  for (const Range& range : ranges) total += range.num_bytes;
  if (total == 0) return {};
  const Piece piece{memory_->pinned()->allocate(total), total};
  launch();
  read_->wait_for(compute_->record());
  Held held{{}, {piece.buffer}};
  std::byte* to = piece.buffer->data();
  CopyList copies;
  for (Range& range : ranges) {
    copies.add(to, range.buffer->data() + range.offset, range.num_bytes);
    to += range.num_bytes;
    held.buffers.push_back(std::move(range.buffer));
  }
  device::Queue& queue = *read_;
  with_room([&] { device::copy_pieces_out(queue, copies.pieces()); });
  FenceRef ready = read_->record();
  held.until.push_back(ready);
  reading_.push_back(std::move(held));
  return {{piece}, std::move(ready)};
}

std::string DeviceBackend::bytes_of(const BufferRef& buffer, size_t num_bytes) {
  Gathered gathered;
  {
    const MutexLock lock(mutex_);
    gathered = read({{buffer, 0, num_bytes}});
  }
  if (gathered.pieces.empty()) return {};
  gathered.ready->wait();
  return {reinterpret_cast<const char*>(gathered.pieces[0].buffer->data()), num_bytes};
}

}  // namespace psstore
