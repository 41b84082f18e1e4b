// What is to be encoded of a slice, and who keeps what its payload leaves out: the three ways of ToEncode, of
// elements or of whole registers of them.
//
// Included only by codec_blocks.h: see loops.h for why everything is in an unnamed namespace.
#pragma once

#include "kernels/codec.h"
#include "kernels/elements.h"

namespace psstore {
namespace {

[[gnu::always_inline]] inline const std::byte* floats_from(const void* floats, int64_t i) {
  return static_cast<const std::byte*>(floats) + i * int64_t{sizeof(float)};
}

// `Value`: a float, or a register of floats of which the first is element i.
template <class Value>
[[gnu::always_inline]] inline Value load_at(const void* floats, int64_t i) {
  return load<Value>(floats_from(floats, i), 0);
}
template <class Value>
[[gnu::always_inline]] inline void store_at(void* floats, int64_t i, Value value) {
  store(static_cast<std::byte*>(floats) + i * int64_t{sizeof(float)}, 0, value);
}

// Nobody.
struct NoFeedback {
  static constexpr bool kTakesNonFinite = false;
  const void* source;

  template <class Value>
  [[gnu::always_inline]] Value meant(int64_t i) const {
    return load_at<Value>(source, i);
  }
  template <class Value>
  [[gnu::always_inline]] void keep(int64_t, Value, Value) const {}
  [[gnu::always_inline]] void fetch_ahead(int64_t i) const {
    __builtin_prefetch(floats_from(source, i) + kFetchedAheadBytes);
  }
};

// A residual, which is part of what is encoded next. It stays where nothing finite was said.
struct ResidualFeedback {
  static constexpr bool kTakesNonFinite = false;
  const void* source;
  void* residual;

  template <class Value>
  [[gnu::always_inline]] Value meant(int64_t i) const {
    return load_at<Value>(source, i) + load_at<Value>(residual, i);
  }
  template <class Value>
  [[gnu::always_inline]] void keep(int64_t i, Value x, Value said) const {
    store_at(residual, i, Value(x - said));
  }
  [[gnu::always_inline]] void fetch_ahead(int64_t i) const {
    __builtin_prefetch(floats_from(source, i) + kFetchedAheadBytes);
    __builtin_prefetch(floats_from(residual, i) + kFetchedAheadBytes);
  }
};

// The difference to a base, which becomes what has been said so far, whatever that is.
struct BaseFeedback {
  static constexpr bool kTakesNonFinite = true;
  const void* source;
  void* base;

  template <class Value>
  [[gnu::always_inline]] Value meant(int64_t i) const {
    return load_at<Value>(source, i) - load_at<Value>(base, i);
  }
  template <class Value>
  [[gnu::always_inline]] void keep(int64_t i, Value, Value said) const {
    store_at(base, i, Value(load_at<Value>(base, i) + said));
  }
  [[gnu::always_inline]] void fetch_ahead(int64_t i) const {
    __builtin_prefetch(floats_from(source, i) + kFetchedAheadBytes);
    __builtin_prefetch(floats_from(base, i) + kFetchedAheadBytes);
  }
};

template <class Visit>
void with_feedback(const ToEncode& what, Visit visit) {
  if (what.residual != nullptr) return visit(ResidualFeedback{what.source, what.residual});
  if (what.base != nullptr) return visit(BaseFeedback{what.source, what.base});
  visit(NoFeedback{what.source});
}

}  // namespace
}  // namespace psstore
