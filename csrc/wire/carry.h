// The body of PUSH, PULL and NORM: what a client tells a shard before it asks.
//
//   bytes   field
//   0..7    newest     number of the last of `decisions`; 0: there are none
//   8..15   at_least   a read waits until the shard has this version
//   16..23  scaled     the decision that `factor` belongs to; 0: no scale is told
//   24..31  wait_s     float64: how long a read may wait, also for values and contributions that are missing
//   32..39  factor     float64, 0 to 1; NaN: the norm is not finite, and the decision is a skip
//   40..    decisions  MessagePack, signed: opaque here; absent if `newest` is 0
//
// An empty body is all zeros. Little-endian. What a shard needs to know of each request is in the fixed
// fields, so that it asks whoever can verify signatures only when a decision is new to it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace psstore {

inline constexpr size_t kCarryFixedBytes = 40;
// Nobody waits longer for a peer; and it is a number that clocks can be added to.
inline constexpr double kMaxWaitS = 30 * 86400.0;

struct Carry {
  uint64_t newest = 0;
  uint64_t at_least = 0;
  uint64_t scaled = 0;
  double wait_s = 0.0;
  std::optional<double> factor;  // of `scaled`; empty: a skip
};

// Throws Error(BAD_BODY).
Carry parse_carry(std::string_view body);
// `decisions`: encoded; none if carry.newest is 0. Of a carry that says nothing the body is empty.
std::string encode_carry(const Carry& carry, std::string_view decisions);

}  // namespace psstore
