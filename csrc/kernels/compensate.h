// The gradient of one block of a slice, made up for what has become of the value since it was taken.
//
// Included only by loops.h: see there why everything is in an unnamed namespace.
#pragma once

#include "kernels/elements.h"
#include "kernels/update.h"
#include "rules/compensation.h"

namespace psstore {
namespace {

template <class T>
class CompensatedGradient {
 public:
  explicit CompensatedGradient(const SliceUpdate& update)
      : base_(static_cast<const std::byte*>(update.base)),
        value_(static_cast<const std::byte*>(update.value_in)),
        rule_(update.compensation) {}

  // The elements from `begin` on, of which `gradient` is the reduced one; valid until the next call.
  const std::byte* block(const std::byte* gradient, int64_t begin, int64_t count) {
    if (base_ == nullptr) return gradient;
    const int64_t offset = begin * static_cast<int64_t>(sizeof(T));
    const std::byte* const base = base_ + offset;
    const std::byte* const value = value_ + offset;
    const std::byte* const streams[] = {gradient, base, value};
    auto* const to = reinterpret_cast<std::byte*>(compensated_);
    for_each_streamed<T>(count, streams, [=, rule = rule_](int64_t i) {
      store<T>(to, i, rule(load<T>(gradient, i), load<T>(value, i), load<T>(base, i)));
    });
    return to;
  }

 private:
  const std::byte* const base_;
  const std::byte* const value_;
  const DelayCompensation<T> rule_;
  alignas(64) T compensated_[kBlockElems];
};

}  // namespace
}  // namespace psstore
