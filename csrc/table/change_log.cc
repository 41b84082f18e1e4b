#include "table/change_log.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "changes/changes.h"
#include "core/breakable_rules.h"

namespace psstore {
namespace {

// So many elements are compared as soon as they are converted, while the nearest cache has them.
constexpr uint64_t kNearElems = 4096;
static_assert(kNearElems % 64 == 0, "marks are words of 64");

// The image, and as much again of marks and changes.
constexpr uint64_t kKeptPerImage = 2;

// Memory of this thread for a slice's elements, which lives until it is asked for again.
enum class Scratch : uint8_t { kChanges, kElements };
std::span<std::byte> scratch(Scratch which, uint64_t num_bytes) {
  thread_local std::array<std::vector<std::byte>, 2> memory;
  std::vector<std::byte>& one = memory[static_cast<size_t>(which)];
  if (one.size() < num_bytes) one.resize(num_bytes);
  return {one.data(), num_bytes};
}

BufferRef copied(std::span<const std::byte> bytes, Backend& backend) {
  BufferRef buffer = backend.allocate(bytes.size());
  if (!bytes.empty()) std::memcpy(buffer->data(), bytes.data(), bytes.size());
  return buffer;
}

uint64_t* words_of(const BufferRef& marks) {
  return reinterpret_cast<uint64_t*>(marks->data());
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
    if (std::optional<BufferRef> changes =
            between(wanted_version - 1, version, value, stored, backend)) {
      return Finding::of_changes(std::move(*changes), dtype_, num_elems_);
    }
  }
  if (version == version_) return {image_, dtype_, dtype_, num_elems_};
  return {value, stored, dtype_, num_elems_};
}

void ChangeLog::go_on(const BufferRef& value, uint64_t version, DType stored, Backend& backend) {
  BufferRef next = backend.allocate(image_bytes());
  BufferRef marks;
  if (image_) marks = backend.allocate(mark_bytes());
  const size_t from_bytes = dtype_bytes(stored);
  const size_t to_bytes = dtype_bytes(dtype_);
  for (uint64_t first = 0; first < num_elems_; first += kNearElems) {
    const uint64_t count = std::min(kNearElems, num_elems_ - first);
    std::byte* const to = next->data() + first * to_bytes;
    backend.convert(stored, dtype_, value->data() + first * from_bytes, to,
                    static_cast<int64_t>(count));
    if (image_) {
      mark_changes(to_bytes, image_->data() + first * to_bytes, to, count,
                   words_of(marks) + num_mark_words(first));
    }
  }
  made_.clear();
  made_bytes_ = 0;
  if (image_) {
    steps_.push_back({version_, std::move(marks)});
    while (steps_.size() * mark_bytes() > image_bytes()) steps_.pop_front();
  }
  image_ = std::move(next);
  version_ = version;
}

size_t ChangeLog::index_of(uint64_t version) const {
  if (version == version_) return steps_.size();
  const auto found = std::ranges::lower_bound(steps_, version, {}, &Step::since);
  if (found == steps_.end()) return SIZE_MAX;
  if (found->since != version && holds(BreakableRule::kMARKS_ARE_SINCE_THEN)) return SIZE_MAX;
  return static_cast<size_t>(found - steps_.begin());
}

std::optional<BufferRef> ChangeLog::between(uint64_t since, uint64_t version,
                                            const BufferRef& value, DType stored,
                                            Backend& backend) {
  const size_t first = index_of(since);
  const size_t last = index_of(version);
  if (first == SIZE_MAX || last == SIZE_MAX || first >= last) return std::nullopt;
  const bool is_past = version != version_;  // the image is of a later one
  if (is_past && holds(BreakableRule::kCHANGES_ARE_OF_THEIR_VERSION)) {
    const std::span<std::byte> then = scratch(Scratch::kElements, image_bytes());
    backend.convert(stored, dtype_, value->data(), then.data(), static_cast<int64_t>(num_elems_));
    return made(first, last, then.data(), backend);
  }
  if (const auto known = made_.find(since); known != made_.end()) return known->second;
  std::optional<BufferRef> changes = made(first, last, image_->data(), backend);
  if (changes) {
    made_bytes_ += (*changes)->size();
    made_.emplace(since, *changes);
    while (made_bytes_ + steps_.size() * mark_bytes() > image_bytes()) {
      made_bytes_ -= made_.begin()->second->size();
      made_.erase(made_.begin());
    }
  }
  return changes;
}

std::optional<BufferRef> ChangeLog::made(size_t first, size_t last, const std::byte* elements,
                                         Backend& backend) const {
  thread_local std::vector<uint64_t> marks;
  const uint64_t* const begin = words_of(steps_[first].marks);
  marks.assign(begin, begin + num_mark_words(num_elems_));
  for (size_t i = first + 1; i < last && holds(BreakableRule::kMARKS_ARE_ADDED_UP); ++i) {
    const uint64_t* const others = words_of(steps_[i].marks);
    for (size_t word = 0; word < marks.size(); ++word) marks[word] |= others[word];
  }
  const std::span<std::byte> room = scratch(Scratch::kChanges, image_bytes());
  const std::optional<size_t> num_bytes =
      encode_changes(dtype_bytes(dtype_), marks.data(), elements, num_elems_, room);
  if (!num_bytes || *num_bytes >= image_bytes()) return std::nullopt;
  return copied(room.first(*num_bytes), backend);
}

size_t ChangeLog::num_bytes() const {
  return (image_ ? image_bytes() : 0) + made_bytes_ + steps_.size() * mark_bytes();
}

}  // namespace psstore
