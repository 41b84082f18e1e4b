// What bounds the rows of a partition, as its table's definition says. Plain values.
#pragma once

#include <cstdint>

namespace psstore {

enum class EvictionKind : uint8_t {
  kNone = 0,
  kLeastRecent = 1,    // by the decision that changed a row last
  kLeastFrequent = 2,  // by how often decisions have changed it lately
  kTimeToLive = 3,     // what no decision has changed for so many
};

enum class AdmissionKind : uint8_t {
  kAlways = 0,
  kAfter = 1,        // from its so-manieth contribution on
  kProbability = 2,  // by lot
};

struct RowBounds {
  uint64_t max_rows = 0;  // of a partition; 0: as many as come
  EvictionKind eviction = EvictionKind::kNone;
  uint32_t time_to_live = 0;  // decisions, of kTimeToLive
  AdmissionKind admission = AdmissionKind::kAlways;
  uint32_t admit_after = 0;      // contributions, of kAfter
  double admit_probability = 1;  // of kProbability

  bool evicts() const { return eviction != EvictionKind::kNone; }

  bool operator==(const RowBounds&) const = default;
};

inline constexpr uint32_t kMaxTimeToLive = uint32_t{1} << 30;
// What counters of contributions hold (admission.h).
inline constexpr uint32_t kMaxAdmitAfter = 255;

}  // namespace psstore
