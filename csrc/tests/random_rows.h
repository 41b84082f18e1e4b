// A table of few partitions on a shard, whose rows are trained and assigned at random.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "admit.h"
#include "shard/shard.h"

namespace psstore::testing {

// What may bound a table: nothing, how many rows there are, or for how long.
inline const RowBounds kAnyBounds[] = {
    {},
    {.max_rows = 50, .eviction = EvictionKind::kLeastRecent},
    {.max_rows = 50,
     .eviction = EvictionKind::kLeastFrequent,
     .admission = AdmissionKind::kAfter,
     .admit_after = 2},
    {.eviction = EvictionKind::kTimeToLive, .time_to_live = 5},
};

class RandomRowsTest : public ::testing::Test {
 public:
  static constexpr uint32_t kDim = 3;
  static constexpr uint64_t kIds = 3000;

 protected:
  static constexpr size_t kPartitions = 2;

  explicit RandomRowsTest(const RowBounds& bounds, const ShardOptions& options)
      : shard(std::make_unique<Shard>(options)) {
    define(bounds);
  }

  // A new one, in the place of the last.
  void define(const RowBounds& bounds) {
    if (table_id > 0) shard->drop(table_id);
    TensorDefinition table{++table_id, DType::kFloat32, RuleKind::kSparseSgd, 0, true, {}};
    for (uint64_t p = 0; p < kPartitions; ++p) table.slices.push_back({make_key(table_id, p), 0});
    table.rows = {kDim, {FirstValueKind::kNormal, 0, 1, 7}, bounds};
    shard->define(table);
  }

  static size_t partition_of(uint64_t id) { return hash_of_id(id) >> 63; }

  std::vector<uint64_t> some_ids(size_t partition, size_t most) {
    std::vector<uint64_t> ids;
    // Few of them often, as in training.
    for (size_t i = 0; i < most; ++i) {
      const uint64_t id = random() % 2 == 0 ? random() % 40 : random() % kIds;
      if (partition_of(id) == partition) ids.push_back(id);
    }
    std::ranges::sort(ids);
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    return ids;
  }

  BufferRef contribution(std::span<const uint64_t> ids, std::vector<SliceEntry>& entries,
                         size_t partition, WriteKind kind) {
    const size_t num_bytes = ids.size() * (kIdBytes + kDim * sizeof(float));
    entries = {{.key = make_key(table_id, partition),
                .num_bytes = static_cast<uint32_t>(num_bytes),
                .dtype = kRowsEncoding}};
    BufferRef payload = admit(*shard, kind, entries, num_bytes);
    if (ids.empty() || !payload) return payload;
    std::memcpy(payload->data(), ids.data(), ids.size() * kIdBytes);
    std::vector<float> rows(ids.size() * kDim);
    for (float& element : rows) element = static_cast<float>(random() % 16) - 8;
    std::memcpy(payload->data() + ids.size() * kIdBytes, rows.data(), rows.size() * sizeof(float));
    return payload;
  }

  void step() {
    ++round;
    for (size_t p = 0; p < kPartitions; ++p) {
      std::vector<SliceEntry> entries;
      const BufferRef payload = contribution(some_ids(p, 10), entries, p, WriteKind::kPush);
      shard->stage({0, 1, round}, entries, payload);
    }
    const Member member{{0, 1, round}, 1.0F, {{table_id, table_id}}};
    shard->advance(Decision(round, false, 1.0, {member}, {{0, {{"lr", 0.5}, {"maximize", 0}}}}));
  }

  void assign(std::span<const uint64_t> ids, size_t partition) {
    std::vector<SliceEntry> entries;
    const BufferRef payload = contribution(ids, entries, partition, WriteKind::kAssign);
    shard->write(WriteKind::kAssign, "client", shard->last_sequence("client") + 1, entries,
                 payload);
  }

  std::unique_ptr<Shard> shard;
  uint64_t table_id = 0;
  std::mt19937_64 random{5};
  uint64_t round = 0;
};

}  // namespace psstore::testing
