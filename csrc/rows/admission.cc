#include "rows/admission.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "rows/row_index.h"

namespace psstore {
namespace {

// Contributions to ids without rows, in a count-min sketch with conservative update: what it says is never less than was
// counted. Source: Cormode and Muthukrishnan, "An improved data stream summary", 2005; Estan and Varghese, "New directions
// in traffic measurement", 2002. All counts are halved after as many as four for each counter of a row, so that what is rare
// is forgotten. Source: Einziger et al., "TinyLFU", 2017.
//
//   | counted since they were halved: u64 | counters: kDepth × width × u8 |
class AfterContributions : public Admission {
 public:
  AfterContributions(const RowBounds& bounds, uint64_t seed)
      : after_(bounds.admit_after), seed_(seed), width_(width_for(bounds.max_rows)) {}

  bool admits(uint64_t id, size_t num_contributions, uint64_t,
              const std::byte* counted) const override {
    const uint64_t before = counted != nullptr ? least(places_of(id), counters(counted)) : 0;
    return before + num_contributions >= after_;
  }
  size_t counted_bytes() const override { return sizeof(uint64_t) + kDepth * width_; }
  void count(uint64_t id, size_t num_contributions, std::byte* counted) const override {
    auto* const all = const_cast<uint8_t*>(counters(counted));
    const Places places = places_of(id);
    const auto sum = static_cast<uint8_t>(
        std::min<uint64_t>(least(places, all) + num_contributions, kMaxAdmitAfter));
    for (const size_t place : places) all[place] = std::max(all[place], sum);

    uint64_t num_counted;
    std::memcpy(&num_counted, counted, sizeof num_counted);
    if (++num_counted == kCountedPerCounter * width_) {
      for (size_t i = 0; i < kDepth * width_; ++i) all[i] /= 2;
      num_counted = 0;
    }
    std::memcpy(counted, &num_counted, sizeof num_counted);
  }

 private:
  static constexpr size_t kDepth = 4;
  static constexpr size_t kCountedPerCounter = 4;
  static constexpr size_t kLeastWidth = size_t{1} << 10;
  static constexpr size_t kMostWidth = size_t{1} << 18;
  static constexpr size_t kUsualWidth = size_t{1} << 15;
  using Places = std::array<size_t, kDepth>;

  static size_t width_for(uint64_t max_rows) {
    if (max_rows == 0) return kUsualWidth;
    return std::bit_ceil(std::clamp<uint64_t>(max_rows, kLeastWidth, kMostWidth));
  }
  static const uint8_t* counters(const std::byte* counted) {
    return reinterpret_cast<const uint8_t*>(counted + sizeof(uint64_t));
  }
  static uint64_t least(const Places& places, const uint8_t* counters) {
    uint8_t found = UINT8_MAX;
    for (const size_t place : places) found = std::min(found, counters[place]);
    return found;
  }
  // By two hashes: Kirsch and Mitzenmacher, "Less hashing, same performance", 2006.
  Places places_of(uint64_t id) const {
    const uint64_t first = hash_of_id(id ^ seed_);
    const uint64_t second = hash_of_id(first ^ seed_);
    Places places;
    for (size_t row = 0; row < kDepth; ++row) {
      places[row] = row * width_ + ((first + row * second) >> 32 & (width_ - 1));
    }
    return places;
  }

  const uint64_t after_;
  const uint64_t seed_;
  const size_t width_;
};

// A lot for each decision on each id.
class ByProbability : public Admission {
 public:
  ByProbability(double probability, uint64_t seed) : probability_(probability), seed_(seed) {}

  bool admits(uint64_t id, size_t, uint64_t decision, const std::byte*) const override {
    const uint64_t lot = hash_of_id(hash_of_id(id ^ seed_) + decision);
    return static_cast<double>(lot >> 11) * 0x1p-53 < probability_;
  }

 private:
  const double probability_;
  const uint64_t seed_;
};

}  // namespace

std::unique_ptr<const Admission> Admission::make(const RowBounds& bounds, uint64_t seed) {
  switch (bounds.admission) {
    case AdmissionKind::kAlways: break;
    case AdmissionKind::kAfter: return std::make_unique<AfterContributions>(bounds, seed);
    case AdmissionKind::kProbability:
      return std::make_unique<ByProbability>(bounds.admit_probability, seed);
  }
  return nullptr;
}

}  // namespace psstore
