// Changes of slices: what is encoded and applied is what was there, bit for bit; what comes from outside harms nobody.
#include "changes/changes.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

namespace psstore {
namespace {

using Bytes = std::vector<std::byte>;

class Changes : public ::testing::TestWithParam<size_t> {
 protected:
  size_t item_bytes() const { return GetParam(); }

  size_t below(size_t limit) { return static_cast<size_t>(random_()) % limit; }

  Bytes random_elements(size_t num_elems) {
    Bytes bytes(num_elems * item_bytes());
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random_());
    return bytes;
  }

  // With about one in `every` elements of other bits; 0: none.
  Bytes changed(const Bytes& before, size_t every) {
    Bytes after = before;
    for (size_t i = 0; every > 0 && i < before.size() / item_bytes(); ++i) {
      if (below(every) == 0) after[i * item_bytes() + below(item_bytes())] ^= std::byte{1};
    }
    return after;
  }

  std::vector<uint64_t> marked(const Bytes& before, const Bytes& after) {
    const uint64_t num_elems = before.size() / item_bytes();
    std::vector<uint64_t> marks(num_mark_words(num_elems), ~uint64_t{0});
    mark_changes(item_bytes(), before.data(), after.data(), num_elems, marks.data());
    return marks;
  }

  std::optional<Bytes> encoded(const std::vector<uint64_t>& marks, const Bytes& after,
                               size_t room) {
    Bytes out(room);
    const auto num_bytes =
        encode_changes(item_bytes(), marks.data(), after.data(), after.size() / item_bytes(), out);
    if (!num_bytes) return std::nullopt;
    out.resize(*num_bytes);
    return out;
  }
  Bytes encoded(const std::vector<uint64_t>& marks, const Bytes& after) {
    return *encoded(marks, after, 2 * after.size() + 8);
  }
  Bytes encoded(const Bytes& before, const Bytes& after) {
    return encoded(marked(before, after), after);
  }

  Bytes applied(const Bytes& before, const Bytes& payload) {
    EXPECT_TRUE(are_changes(item_bytes(), payload, before.size() / item_bytes()));
    Bytes after = before;
    apply_changes(item_bytes(), payload, after.data());
    return after;
  }

  std::mt19937 random_{20260701};
};

INSTANTIATE_TEST_SUITE_P(ItemBytes, Changes, ::testing::Values(2, 4, 8));

TEST_P(Changes, OfEverySizeAndShareAreWhatTheyWere) {
  for (size_t num_elems = 0; num_elems < 140; ++num_elems) {
    for (const size_t every : {0u, 1u, 2u, 7u, 40u}) {
      const Bytes before = random_elements(num_elems);
      const Bytes after = changed(before, every);
      const Bytes payload = encoded(before, after);
      EXPECT_EQ(applied(before, payload), after);
      EXPECT_EQ(payload.empty(), before == after);
      EXPECT_TRUE(every != 1 || payload.size() == num_elems * (item_bytes() + 1));
    }
  }
}

TEST_P(Changes, OfOneElementAnywhereAreFoundAndFarOnesTakeLongerGaps) {
  const size_t num_elems = 300;
  const Bytes before = random_elements(num_elems);
  for (size_t i = 0; i < num_elems; ++i) {
    for (size_t byte = 0; byte < item_bytes(); ++byte) {
      Bytes after = before;
      after[i * item_bytes() + byte] ^= std::byte{0x80};
      const Bytes payload = encoded(before, after);
      EXPECT_EQ(payload.size(), item_bytes() + (i < 128 ? 1 : 2));
      EXPECT_EQ(applied(before, payload), after);
    }
  }
  Bytes far = random_elements(40'000);
  Bytes after = far;
  after.back() ^= std::byte{1};
  EXPECT_EQ(encoded(far, after).size(), item_bytes() + 3);
  EXPECT_EQ(applied(far, encoded(far, after)), after);
}

TEST_P(Changes, AreOfBitsAndNotOfNumbers) {
  const std::vector<uint64_t> patterns = {0,
                                          ~uint64_t{0},
                                          0x7FC0'7FC0'7FC0'7FC0,
                                          0x7FC1'7FC1'7FC1'7FC1,
                                          0x7F80'7F80'7F80'7F80,
                                          0x8000'8000'8000'8000,
                                          0x7FF8'0000'7FF8'0001};
  for (const uint64_t from : patterns) {
    for (const uint64_t to : patterns) {
      Bytes before(24), after(24);
      for (size_t i = 0; i < 24; i += 8) {
        std::memcpy(before.data() + i, &from, 8);
        std::memcpy(after.data() + i, &to, 8);
      }
      EXPECT_EQ(applied(before, encoded(before, after)), after);
    }
  }
}

TEST_P(Changes, ThatDoNotFitAreRefusedAtExactlyTheirSize) {
  const Bytes before = random_elements(200);
  const Bytes after = changed(before, 3);
  const size_t size = encoded(before, after).size();
  const std::vector<uint64_t> marks = marked(before, after);
  EXPECT_EQ(encoded(marks, after, size), encoded(before, after));
  for (size_t room = 0; room < size; ++room) EXPECT_FALSE(encoded(marks, after, room));
}

TEST_P(Changes, OfWhatAnyMarksAreOfHaveTheEffectOfAll) {
  for (size_t round = 0; round < 2000; ++round) {
    const Bytes first = random_elements(below(200));
    const Bytes second = changed(first, below(12));
    const Bytes third = changed(second, below(12));
    std::vector<uint64_t> marks = marked(first, second);
    const std::vector<uint64_t> others = marked(second, third);
    for (size_t i = 0; i < marks.size(); ++i) marks[i] |= others[i];
    const Bytes payload = encoded(marks, third);
    EXPECT_EQ(applied(first, payload), third);
    EXPECT_EQ(applied(second, payload), third);
  }
}

// The sanitizers see every byte that is read or written where none is.
TEST_P(Changes, FromOutsideAreRefusedOrStayWithinTheSlice) {
  size_t refused = 0;
  for (size_t round = 0; round < 20'000; ++round) {
    const size_t num_elems = below(100);
    Bytes payload;
    if (below(2) == 0) {
      payload.resize(below(60));
      for (std::byte& byte : payload) byte = static_cast<std::byte>(random_());
    } else {
      const Bytes before = random_elements(num_elems);
      payload = encoded(before, changed(before, 1 + below(8)));
      for (size_t i = below(3); i > 0 && !payload.empty(); --i) {
        payload[below(payload.size())] = static_cast<std::byte>(random_());
      }
      if (below(3) == 0) payload.resize(below(payload.size() + 1));
    }
    const Bytes exact(payload.begin(), payload.end());
    if (are_changes(item_bytes(), exact, num_elems)) {
      applied(random_elements(num_elems), exact);
    } else {
      ++refused;
    }
  }
  EXPECT_GT(refused, 5000U);
  EXPECT_LT(refused, 19'000U);
}

TEST_P(Changes, WithGapsBeyondTheSliceAreNone) {
  for (size_t length = 1; length < 20; ++length) {
    Bytes payload(length, std::byte{0xFF});
    EXPECT_FALSE(are_changes(item_bytes(), payload, 1 << 20));
    payload.push_back(std::byte{0x01});
    payload.resize(payload.size() + item_bytes());
    EXPECT_EQ(are_changes(item_bytes(), payload, 1 << 20), length < 3) << "14 bits and one more";
  }
  EXPECT_TRUE(are_changes(item_bytes(), {}, 0));
}

}  // namespace
}  // namespace psstore
