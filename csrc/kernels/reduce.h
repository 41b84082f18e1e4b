// The gradient of one block of a slice: the weighted sum of the contributions in rank order, or of those that are left
// of them once each element is sorted, divided and scaled.
//
// How a few contributions are added is `Sums`: ElementSums, or what an instruction set has of its own.
//
// Included only by loops.h and squares.h: see loops.h for why everything is in an unnamed namespace.
#pragma once

#include <algorithm>
#include <bit>
#include <span>

#include "kernels/elements.h"
#include "kernels/sorted.h"
#include "kernels/sums.h"
#include "kernels/update.h"

namespace psstore {
namespace {

// How many at the front are added in one pass: 8, 4, 2 or 1 of one dtype.
inline size_t group_size(std::span<const Contribution> contributions) {
  const DType dtype = contributions.front().dtype;
  size_t length = 1;
  while (length < std::min(kLargestGroup, contributions.size()) &&
         contributions[length].dtype == dtype) {
    ++length;
  }
  return std::bit_floor(length);
}

// `entries`: of the first contributions, as BlockSum has it for a group.
template <class Sums, class T>
void reduce_block(const SliceUpdate& update, double scale, int64_t begin, int64_t count,
                  T* gradient, std::span<int64_t> entries) {
  std::span<const Contribution> rest = update.contributions;
  BlockSum<T> sum{kNothing<T>.data(), gradient, begin, count};
  const T divisor = static_cast<T>(update.divisor);
  if (rest.empty()) std::fill_n(gradient, count, T(0) / divisor * static_cast<T>(scale));
  while (!rest.empty()) {
    const std::span<const Contribution> group = rest.first(group_size(rest));
    rest = rest.subspan(group.size());
    sum.entries = entries.first(std::min(group.size(), entries.size()));
    entries = entries.subspan(sum.entries.size());
    if (rest.empty()) {
      sum.divisor = divisor;
      sum.scale = static_cast<T>(scale);
    }
    Sums::add(sum, group, update.num_elems);
    sum.before = gradient;
  }
}

// Where the gradient of the slice can be read as it came, without a sum.
template <class T>
const std::byte* sole_gradient(const SliceUpdate& update) {
  if (update.contributions.size() != 1 || update.divisor != 1.0 || update.sorted) return nullptr;
  const Contribution& sole = update.contributions.front();
  if (sole.dtype != update.dtype || sole.weight != 1.0F) return nullptr;
  return static_cast<const std::byte*>(sole.data);
}

// What sums the slice in one pass, for short blocks; null where it takes several, and for encodings: with less
// memory to wait for, what a block costs beside counts for more than what it overlaps.
template <class Sums, class T>
AddBlock<T> pass_of(const SliceUpdate& update) {
  const std::span<const Contribution> all = update.contributions;
  if (all.empty() || update.sorted) return nullptr;
  if (is_encoding(all.front().dtype) || group_size(all) < all.size()) return nullptr;
  return Sums::chosen(all, static_cast<T>(update.divisor));
}

// Of a slice that takes one pass: no more than 1 KiB of contributions.
inline int64_t short_block_elems(std::span<const Contribution> all) {
  const bool is_wide = all.size() == 8 && all.front().dtype == DType::kFloat32;
  return is_wide ? kShortestBlockElems : kShortBlockElems;
}

inline int64_t long_block_elems(const SliceUpdate& update) {
  return update.sorted ? sorted_block_elems(num_members(update)) : kBlockElems;
}

// The gradient of a slice, times `scale`, a block at a time.
template <class Sums, class T>
class BlockGradient {
 public:
  BlockGradient(const SliceUpdate& update, double scale)
      : update_(update),
        scale_(scale),
        sole_(scale == 1.0 ? sole_gradient<T>(update) : nullptr),
        add_(sole_ == nullptr ? pass_of<Sums, T>(update) : nullptr),
        block_elems_(add_ == nullptr ? long_block_elems(update)
                                     : short_block_elems(update.contributions)) {}

  // How many elements to ask for at once.
  int64_t block_elems() const { return block_elems_; }

  // The elements from `begin` on, at most block_elems(); valid until the next call.
  const std::byte* block(int64_t begin, int64_t count) {
    if (sole_ != nullptr) return sole_ + begin * static_cast<int64_t>(sizeof(T));
    if (add_ != nullptr && count == block_elems_) {
      add_({kNothing<T>.data(), reduced_, begin, count, static_cast<T>(update_.divisor),
            static_cast<T>(scale_)},
           update_.contributions.data(), update_.num_elems);
    } else if (update_.sorted) {
      reduce_sorted<Sums>(update_, scale_, begin, count, reduced_, entries_);
    } else {
      reduce_block<Sums>(update_, scale_, begin, count, reduced_, entries_);
    }
    return reinterpret_cast<const std::byte*>(reduced_);
  }

 private:
  const SliceUpdate& update_;
  const double scale_;
  const std::byte* const sole_;
  const AddBlock<T> add_;
  const int64_t block_elems_;
  alignas(64) T reduced_[kBlockElems];
  int64_t entries_[4 * kLargestGroup] = {};  // those of later contributions are searched for
};

}  // namespace
}  // namespace psstore
