#include "table/change_log.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "changes/changes.h"

namespace psstore {
namespace {

// The image, and as much again of changes.
constexpr uint64_t kKeptPerImage = 2;

// Where changes are made before it is known how long they are: a slice's, of this thread.
std::span<std::byte> scratch(uint64_t num_bytes, size_t which) {
  thread_local std::vector<std::byte> memory[2];
  if (memory[which].size() < num_bytes) memory[which].resize(num_bytes);
  return {memory[which].data(), num_bytes};
}

BufferRef copied(std::span<const std::byte> bytes, Backend& backend) {
  BufferRef buffer = backend.allocate(bytes.size());
  if (!bytes.empty()) std::memcpy(buffer->data(), bytes.data(), bytes.size());
  return buffer;
}

std::span<const std::byte> bytes_of(const BufferRef& buffer) {
  return {buffer->data(), buffer->size()};
}

}  // namespace

void ChangeLog::GiveBack::operator()(const uint64_t* taken) const noexcept {
  budget->give_back(*taken);
  delete taken;
}

ChangeLog::ChangeLog(DType dtype, uint64_t num_elems, std::shared_ptr<MemoryBudget> budget)
    : dtype_(dtype), num_elems_(num_elems) {
  auto taken = std::make_unique<const uint64_t>(kKeptPerImage * image_bytes());
  budget->take(*taken);
  taken_ = {taken.release(), GiveBack{std::move(budget)}};
}

Finding ChangeLog::find(const BufferRef& value, uint64_t version, DType stored,
                        uint64_t wanted_version, Backend& backend) {
  if (!image_ || version > version_) go_on(value, version, stored, backend);
  if (wanted_version > 0) {
    if (std::optional<BufferRef> changes = between(wanted_version - 1, version, backend)) {
      const uint64_t num_bytes = (*changes)->size();
      return {std::move(*changes), dtype_, dtype_, num_elems_, num_bytes};
    }
  }
  if (version == version_) return {image_, dtype_, dtype_, num_elems_};
  return {value, stored, dtype_, num_elems_};
}

void ChangeLog::go_on(const BufferRef& value, uint64_t version, DType stored, Backend& backend) {
  BufferRef next = backend.allocate(image_bytes());
  backend.convert(stored, dtype_, value->data(), next->data(), static_cast<int64_t>(num_elems_));
  merged_.clear();
  changes_bytes_ = 0;
  for (const Step& step : steps_) changes_bytes_ += step.payload->size();
  if (image_) {
    const std::span<std::byte> room = scratch(image_bytes(), 0);
    const std::optional<size_t> num_bytes =
        encode_changes(dtype_bytes(dtype_), image_->data(), next->data(), num_elems_, room);
    if (num_bytes && *num_bytes < image_bytes()) {
      add_step(copied(room.first(*num_bytes), backend));
    } else {
      steps_.clear();
      changes_bytes_ = 0;
    }
  }
  image_ = std::move(next);
  version_ = version;
}

void ChangeLog::add_step(BufferRef payload) {
  changes_bytes_ += payload->size();
  steps_.push_back({version_, std::move(payload)});
  while (changes_bytes_ > image_bytes()) {
    changes_bytes_ -= steps_.front().payload->size();
    steps_.pop_front();
  }
}

size_t ChangeLog::index_of(uint64_t version) const {
  if (version == version_) return steps_.size();
  const auto found = std::ranges::lower_bound(steps_, version, {}, &Step::since);
  if (found == steps_.end() || found->since != version) return SIZE_MAX;
  return static_cast<size_t>(found - steps_.begin());
}

std::optional<BufferRef> ChangeLog::between(uint64_t since, uint64_t version, Backend& backend) {
  const size_t first = index_of(since);
  const size_t last = index_of(version);
  if (first == SIZE_MAX || last == SIZE_MAX || first >= last) return std::nullopt;
  if (first + 1 == last) return steps_[first].payload;
  const bool is_up_to_image = last == steps_.size();
  const auto known = merged_.find(since);
  if (is_up_to_image && known != merged_.end()) return known->second;
  std::optional<BufferRef> changes = merged(first, last, backend);
  if (changes && is_up_to_image && changes_bytes_ + (*changes)->size() <= image_bytes()) {
    changes_bytes_ += (*changes)->size();
    merged_.emplace(since, *changes);
  }
  return changes;
}

std::optional<BufferRef> ChangeLog::merged(size_t first, size_t last, Backend& backend) const {
  std::span<const std::byte> all = bytes_of(steps_[first].payload);
  for (size_t i = first + 1; i < last; ++i) {
    const std::span<std::byte> room = scratch(image_bytes(), i % 2);
    const std::optional<size_t> num_bytes =
        merge_changes(dtype_bytes(dtype_), all, bytes_of(steps_[i].payload), room);
    if (!num_bytes || *num_bytes >= image_bytes()) return std::nullopt;
    all = room.first(*num_bytes);
  }
  return copied(all, backend);
}

size_t ChangeLog::num_bytes() const {
  return (image_ ? image_bytes() : 0) + changes_bytes_;
}

}  // namespace psstore
