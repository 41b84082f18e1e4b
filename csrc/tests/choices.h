// A byte string as a program: whatever a fuzz target chooses, the next byte says. After the last one all are 0, which is to
// choose the first, and what is usual.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <span>

namespace psstore::testing {

class Choices {
 public:
  explicit Choices(std::span<const std::byte> program) : left_(program) {}

  bool any_left() const { return !left_.empty(); }

  uint8_t byte() {
    if (left_.empty()) return 0;
    const std::byte first = left_.front();
    left_ = left_.subspan(1);
    return std::to_integer<uint8_t>(first);
  }
  // Of a large limit the first 256.
  size_t below(size_t limit) { return byte() % limit; }
  bool one_in(size_t turns) { return below(turns) == turns - 1; }

  template <typename T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[below(values.size())];
  }
  template <typename Range>
  const auto& one_of(const Range& values) {
    return std::data(values)[below(std::size(values))];
  }

  // At an edge of what some integer holds.
  uint64_t extreme() {
    const uint64_t edge = one_of<uint64_t>({0, uint64_t{1} << 32, uint64_t{1} << 63});
    return edge + below(3) - 1;
  }

 private:
  std::span<const std::byte> left_;
};

}  // namespace psstore::testing
