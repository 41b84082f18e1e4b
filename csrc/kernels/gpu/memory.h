// Elements of device memory, a few at a time: one access of up to 16 bytes where the address allows it.
//
// Everything in this folder but the *_cuda.cu files is compiled for the host too, where the tests run the
// very same kernel bodies thread by thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/half.h"

namespace psstore::gpu {

// Neighbouring elements in registers.
template <class E, int N>
struct Pack {
  E elems[N];

  PSSTORE_GPU E& operator[](int i) { return elems[i]; }
  PSSTORE_GPU const E& operator[](int i) const { return elems[i]; }
};

// What one thread takes of a tensor: 16 bytes.
template <class T>
inline constexpr int kVectorElems = static_cast<int>(16 / sizeof(T));

// The widest access that there is; a larger pack takes several.
template <class E, int N>
inline constexpr size_t kPackAlignment = sizeof(E) * N < 16 ? sizeof(E) * N : 16;

PSSTORE_GPU bool is_aligned(const void* address, size_t alignment) {
  return (reinterpret_cast<uintptr_t>(address) & (alignment - 1)) == 0;
}

// A kernel finds its pointers in memory, where the compiler can't see that they are global addresses; it
// then makes slower, generic accesses.
template <class P>
PSSTORE_GPU P* global(P* address) {
#ifdef __CUDA_ARCH__
  __builtin_assume(__isGlobal(address));
#endif
  return address;
}

template <size_t kAlignment, class P>
PSSTORE_GPU P load_at(const std::byte* address) {
  P pack;
  std::memcpy(&pack, __builtin_assume_aligned(global(address), kAlignment), sizeof(P));
  return pack;
}

template <size_t kAlignment, class P>
PSSTORE_GPU void store_at(std::byte* address, const P& pack) {
  std::memcpy(__builtin_assume_aligned(global(address), kAlignment), &pack, sizeof(P));
}

#ifdef __CUDA_ARCH__
// What one access of so many bytes takes.
template <size_t kBytes>
struct WordOf;
template <>
struct WordOf<16> {
  using Type = uint4;
};
template <>
struct WordOf<8> {
  using Type = uint2;
};
template <>
struct WordOf<4> {
  using Type = uint32_t;
};
template <>
struct WordOf<2> {
  using Type = uint16_t;
};
template <>
struct WordOf<1> {
  using Type = uint8_t;
};
#endif

// The same by words of the alignment. Loads by load_at() on two sides of a branch are alike but for the alignment, so
// that the compiler makes one of them, by bytes: for passes that do little else that is slow, and for those that do
// much the shorter code is better.
template <size_t kAlignment, class P>
PSSTORE_GPU P load_words_at(const std::byte* address) {
#ifdef __CUDA_ARCH__
  using Word = typename WordOf<kAlignment>::Type;
  Word words[sizeof(P) / kAlignment];
  static_assert(sizeof(words) == sizeof(P));
  const auto* from = reinterpret_cast<const Word*>(global(address));
  for (size_t i = 0; i < sizeof(P) / kAlignment; ++i) words[i] = from[i];
  P pack;
  std::memcpy(&pack, words, sizeof(P));
  return pack;
#else
  return load_at<kAlignment, P>(address);
#endif
}

// What is known of an address; kElement: it may be aligned to a whole pack, which is then asked.
enum class Alignment { kAny, kElement, kPack };

// Elements from `begin` on. Where not even an element is aligned, a byte at a time.
template <class E, int N, Alignment kKnown = Alignment::kAny>
PSSTORE_GPU Pack<E, N> load_pack(const void* data, int64_t begin) {
  using P = Pack<E, N>;
  constexpr size_t kWhole = kPackAlignment<E, N>;
  const auto* address = static_cast<const std::byte*>(data) + begin * int64_t{sizeof(E)};
  if (kKnown == Alignment::kPack || is_aligned(address, kWhole)) return load_at<kWhole, P>(address);
  if (kKnown == Alignment::kElement || is_aligned(address, sizeof(E))) {
    return load_at<sizeof(E), P>(address);
  }
  return load_at<1, P>(address);
}

// The same by accesses as wide as the address allows.
template <class E, int N>
PSSTORE_GPU Pack<E, N> load_widely(const void* data, int64_t begin) {
  using P = Pack<E, N>;
  constexpr size_t kWhole = kPackAlignment<E, N>;
  const auto* address = static_cast<const std::byte*>(data) + begin * int64_t{sizeof(E)};
  if (is_aligned(address, kWhole)) return load_words_at<kWhole, P>(address);
  if (is_aligned(address, sizeof(E))) return load_words_at<sizeof(E), P>(address);
  return load_words_at<1, P>(address);
}

template <Alignment kKnown = Alignment::kAny, class E, int N>
PSSTORE_GPU void store_pack(void* data, int64_t begin, const Pack<E, N>& pack) {
  constexpr size_t kWhole = kPackAlignment<E, N>;
  auto* address = static_cast<std::byte*>(data) + begin * int64_t{sizeof(E)};
  if (kKnown == Alignment::kPack || is_aligned(address, kWhole)) {
    store_at<kWhole>(address, pack);
  } else if (kKnown == Alignment::kElement || is_aligned(address, sizeof(E))) {
    store_at<sizeof(E)>(address, pack);
  } else {
    store_at<1>(address, pack);
  }
}

template <class E>
PSSTORE_GPU E load_one(const void* data, int64_t index) {
  return load_pack<E, 1>(data, index)[0];
}

template <class E>
PSSTORE_GPU void store_one(void* data, int64_t index, E element) {
  store_pack(data, index, Pack<E, 1>{{element}});
}

// To the number type that is computed in: exact, but for double to float.
template <class To, class E>
PSSTORE_GPU To number(E element) {
  if constexpr (std::is_arithmetic_v<E>) {
    return static_cast<To>(element);
  } else {
    return static_cast<To>(to_float(element));
  }
}

// Sums of integers only: their order is free.
template <class Integer>
PSSTORE_GPU void add_atomically(Integer* sum, Integer amount) {
#ifdef __CUDA_ARCH__
  atomicAdd(sum, amount);
#else
  *sum += amount;
#endif
}

// May be called by any number of threads at once.
PSSTORE_GPU void set_atomically(uint32_t* flag) {
#ifdef __CUDA_ARCH__
  atomicOr(flag, 1U);
#else
  *flag = 1;
#endif
}

}  // namespace psstore::gpu
