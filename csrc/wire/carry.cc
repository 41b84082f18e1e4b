#include "wire/carry.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "core/errors.h"

namespace psstore {
namespace {

struct Fixed {
  uint64_t newest, at_least, scaled;
  double wait_s, factor;
};
static_assert(sizeof(Fixed) == kCarryFixedBytes);

[[noreturn]] void refuse(const std::string& why) {
  throw Error(ErrorCode::BAD_BODY, "body of Carry: " + why);
}

}  // namespace

Carry parse_carry(std::string_view body) {
  if (body.empty()) return {};
  if (body.size() < kCarryFixedBytes) {
    refuse("expected " + std::to_string(kCarryFixedBytes) + " bytes or more, got " +
           std::to_string(body.size()));
  }
  Fixed fixed;
  std::memcpy(&fixed, body.data(), sizeof fixed);
  if (!(fixed.wait_s >= 0.0 && fixed.wait_s <= kMaxWaitS)) {
    refuse("wait_s is " + std::to_string(fixed.wait_s) + "; expected 0 to " +
           std::to_string(kMaxWaitS) + " seconds");
  }
  if ((fixed.newest == 0) != (body.size() == kCarryFixedBytes)) {
    refuse("newest is " + std::to_string(fixed.newest) + ", and decisions are " +
           std::to_string(body.size() - kCarryFixedBytes) + " bytes; expected both or neither");
  }
  const bool is_skip = std::isnan(fixed.factor);
  if (!is_skip && !(fixed.factor >= 0.0 && fixed.factor <= 1.0)) {
    refuse("the scale's factor is " + std::to_string(fixed.factor) + "; expected 0 to 1, or NaN");
  }
  Carry carry{fixed.newest, fixed.at_least, fixed.scaled, fixed.wait_s, std::nullopt};
  if (!is_skip) carry.factor = fixed.factor;
  return carry;
}

std::string encode_carry(const Carry& carry, std::string_view decisions) {
  if (carry.newest == 0 && carry.at_least == 0 && carry.scaled == 0 && carry.wait_s == 0.0) {
    return {};
  }
  const Fixed fixed{carry.newest, carry.at_least, carry.scaled, carry.wait_s,
                    carry.factor.value_or(std::numeric_limits<double>::quiet_NaN())};
  std::string body(reinterpret_cast<const char*>(&fixed), sizeof fixed);
  return body.append(decisions);
}

}  // namespace psstore
