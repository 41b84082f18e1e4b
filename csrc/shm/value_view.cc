#include "shm/value_view.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace psstore {
namespace {

// Of the arena's. A process may have 65,530 in all (vm.max_map_count), and the memory between two of these is
// another one.
constexpr size_t kMostMappings = 8192;

// Of an address space, with which sums can't overflow.
constexpr size_t kMostBytes = size_t{1} << 47;

}  // namespace

ValueView::ValueView(std::vector<Part> parts)
    : parts_(std::move(parts)), room_(parts_.size()), shown_(parts_.size()) {
  std::vector<size_t> order(parts_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, {}, [&](size_t part) { return parts_[part].begin; });
  for (const size_t part : order) {
    const auto& [begin, num_bytes] = parts_[part];
    if (begin < num_bytes_ || num_bytes > kMostBytes || begin > kMostBytes) {
      throw std::invalid_argument("the parts of a view overlap, or are too large");
    }
    num_bytes_ = begin + num_bytes;
  }
  const size_t all = whole_pages(std::max<size_t>(num_bytes_, 1));  // as nothing can't be mapped
  for (size_t i = 0; i < order.size(); ++i) {
    const size_t end = i + 1 < order.size() ? parts_[order[i + 1]].begin : all;
    room_[order[i]] = end - parts_[order[i]].begin;
  }
  void* const mapped = mmap(nullptr, all, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) {
    throw std::system_error(errno, std::generic_category(), "mapping memory for values");
  }
  data_ = static_cast<std::byte*>(mapped);
}

ValueView::~ValueView() {
  munmap(data_, whole_pages(std::max<size_t>(num_bytes_, 1)));
}

size_t ValueView::shown(const ClientMemory& memory, std::span<const SliceEntry> entries,
                        size_t first) const {
  size_t found = 0;
  for (size_t i = 0; i < entries.size() && first + i < shown_.size(); ++i) {
    found += shown_[first + i] == Shown{memory.arena(), entries[i].offset};
  }
  return found;
}

void ValueView::show(const ClientMemory& memory, std::span<const SliceEntry> entries,
                     size_t first) {
  if (first > parts_.size() || entries.size() > parts_.size() - first) {
    throw Error(ErrorCode::BAD_HEADER, "more slices came than were asked for");
  }
  for (size_t i = 0; i < entries.size(); ++i) {
    memory.check(entries[i], parts_[first + i].num_bytes);
  }
  for (size_t begin = 0, end = 0; begin < entries.size(); begin = end) {
    const size_t part = first + begin;
    end = begin + 1;
    if (entries[begin].num_bytes == 0) continue;
    if (may_be_mapped(part, entries[begin].offset)) {
      // What follows there as it does here is the same mapping.
      while (end < entries.size() && follows(first + end) &&
             may_be_mapped(first + end, entries[end].offset) &&
             entries[end].offset - entries[begin].offset ==
                 parts_[first + end].begin - parts_[part].begin) {
        ++end;
      }
      if (map(memory, entries, first, begin, end)) continue;
    }
    for (size_t i = begin; i < end; ++i) copy(memory, entries[i], first + i);
  }
}

std::vector<std::span<std::byte>> ValueView::own(size_t first, size_t count) {
  if (first > parts_.size() || count > parts_.size() - first) {
    throw std::invalid_argument("a view has no such parts");
  }
  std::vector<std::span<std::byte>> ranges;
  for (size_t part = first; part < first + count; ++part) {
    make_own(part);
    ranges.emplace_back(data_ + parts_[part].begin, parts_[part].num_bytes);
  }
  return ranges;
}

// Whole pages: those of the file hold what belongs to nobody else in this view.
bool ValueView::may_be_mapped(size_t part, uint64_t offset) const {
  const auto& [begin, num_bytes] = parts_[part];
  return begin % page_bytes() == 0 && offset % page_bytes() == 0 && num_bytes >= page_bytes() &&
         room_[part] >= whole_pages(num_bytes) && num_mappings_ < kMostMappings;
}

// The entries [begin, end), which lie in the arena as their parts do here.
// False: the process has as many mappings as it may.
bool ValueView::map(const ClientMemory& memory, std::span<const SliceEntry> entries, size_t first,
                    size_t begin, size_t end) {
  const auto wanted = [&](size_t i) { return Shown{memory.arena(), entries[i].offset}; };
  const auto is_there = [&](size_t i) { return shown_[first + i] == wanted(i); };
  while (begin < end && is_there(begin)) ++begin;
  while (begin < end && is_there(end - 1)) --end;
  if (begin == end) return true;
  const Part& last = parts_[first + end - 1];
  const size_t from = parts_[first + begin].begin;
  const size_t num_bytes = whole_pages(last.begin + last.num_bytes - from);
  if (!place(from, num_bytes, memory.values_file(), entries[begin].offset)) return false;
  const size_t before = mappings(first + begin, first + end);
  for (size_t i = begin; i < end; ++i) shown_[first + i] = wanted(i);
  num_mappings_ += mappings(first + begin, first + end) - before;
  return true;
}

void ValueView::copy(const ClientMemory& memory, const SliceEntry& entry, size_t part) {
  make_own(part);
  std::memcpy(data_ + parts_[part].begin, memory.values() + entry.offset, entry.num_bytes);
}

void ValueView::make_own(size_t part) {
  if (shown_[part].arena == 0) return;
  if (!place(parts_[part].begin, whole_pages(parts_[part].num_bytes), -1, 0)) {
    throw std::system_error(errno, std::generic_category(), "mapping memory for values");
  }
  const size_t before = mappings(part, part + 1);
  shown_[part] = {};
  num_mappings_ += mappings(part, part + 1) - before;
}

// Its predecessor ends where it begins: between others may lie what is another shard's.
bool ValueView::follows(size_t part) const {
  return part > 0 && parts_[part].begin == parts_[part - 1].begin + room_[part - 1];
}

// How many begin with one of the parts [begin, end), or with the one that follows.
size_t ValueView::mappings(size_t begin, size_t end) const {
  size_t found = 0;
  for (size_t part = begin; part < std::min(end + 1, parts_.size()); ++part) {
    if (shown_[part].arena == 0) continue;
    const bool goes_on = follows(part) && shown_[part - 1].arena == shown_[part].arena &&
                         shown_[part].offset - shown_[part - 1].offset ==
                             parts_[part].begin - parts_[part - 1].begin;
    found += !goes_on;
  }
  return found;
}

// From a file, for reading, or zeros (fd -1). It takes the place of what was there, which stays if that fails.
bool ValueView::place(size_t begin, size_t num_bytes, int fd, uint64_t offset) {
  const int protection = fd >= 0 ? PROT_READ : PROT_READ | PROT_WRITE;
  const int kind = fd >= 0 ? MAP_SHARED | MAP_POPULATE : MAP_PRIVATE | MAP_ANONYMOUS;
  return mmap(data_ + begin, num_bytes, protection, kind | MAP_FIXED | MAP_NORESERVE, fd,
              static_cast<off_t>(offset)) != MAP_FAILED;
}

}  // namespace psstore
