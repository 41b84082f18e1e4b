// float16 to and from float32 by the instruction for it, which no compiler makes of a loop. Other conversions are as fast
// as memory in a compiler's own vector code.
//
// `Registers` says what the instruction is. Included only by the .cc file of an instruction set: see loops.h for the
// unnamed namespace.
//
// What is written is fetched ahead as well: from memory 1.2 to 1.35 times as fast as without (AVX-512, in turns). Where
// more is read than written, as by other encoders, it brings nothing.
#pragma once

#include <type_traits>

#include "kernels/convert.h"

namespace psstore {
namespace {

template <class Registers>
struct VectorConversions {
  using Vector = typename Registers::Vector;
  using Halves = typename Registers::Halves;
  static constexpr int64_t kElems = Registers::kElems;

  template <class From, class To>
  static void convert(const std::byte* source, std::byte* destination, int64_t count) {
    int64_t done = 0;
    if constexpr (std::is_same_v<From, float> && std::is_same_v<To, Float16>) {
      done = convert_registers<Vector>(source, destination, count,
                                       [](Vector x) { return Registers::to_float16(x); });
    } else if constexpr (std::is_same_v<From, Float16> && std::is_same_v<To, float>) {
      done = convert_registers<Halves>(source, destination, count,
                                       [](Halves x) { return Registers::to_float(x); });
    }
    convert_elements<From, To>(source + done * int64_t{sizeof(From)},
                               destination + done * int64_t{sizeof(To)}, count - done);
  }

 private:
  // As many as fill registers; how many these were.
  template <class From, class Convert>
  static int64_t convert_registers(const std::byte* source, std::byte* destination, int64_t count,
                                   Convert convert) {
    using To = decltype(convert(From{}));
    const int64_t num_registers = count / kElems;
    for (int64_t r = 0; r < num_registers; ++r) {
      __builtin_prefetch(source + r * int64_t{sizeof(From)} + kFetchedAheadBytes);
      __builtin_prefetch(destination + r * int64_t{sizeof(To)} + kFetchedAheadBytes, 1);
      store(destination, r, convert(load<From>(source, r)));
    }
    return num_registers * kElems;
  }
};

}  // namespace
}  // namespace psstore
