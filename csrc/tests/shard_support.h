// A shard and short ways to send it slices: what the server does with frames, without frames.
#pragma once

#include "admit.h"
#include "shard/shard.h"
#include "table_support.h"

namespace psstore::testing {

using Values = std::vector<std::pair<Key, Floats>>;

inline std::vector<SliceEntry> entries_for(const Values& values) {
  std::vector<SliceEntry> entries;
  for (const auto& [key, floats] : values) {
    SliceEntry entry;
    entry.key = key;
    entry.num_bytes = static_cast<uint32_t>(floats.size() * sizeof(float));
    entries.push_back(entry);
  }
  return entries;
}

inline std::vector<ErrorCode> statuses_of(const std::vector<SliceEntry>& entries) {
  std::vector<ErrorCode> statuses;
  for (const SliceEntry& entry : entries) statuses.push_back(entry.status);
  return statuses;
}

class ShardTest : public OnDevices {
 protected:
  void define(uint64_t tensor, RuleKind rule, uint64_t num_elems, bool zeros = true) {
    shard.define({tensor, DType::kFloat32, rule, 0, zeros, {{make_key(tensor, 0), num_elems}}});
  }

  // Admits a payload and fills it in, as the decoder does.
  BufferRef receive(WriteKind kind, const Values& values, std::vector<SliceEntry>& entries) {
    entries = entries_for(values);
    uint64_t num_bytes = 0;
    for (const SliceEntry& entry : entries) num_bytes += entry.num_bytes;
    BufferRef payload = admit(shard, kind, entries, num_bytes);
    std::byte* to = payload ? payload->data() : nullptr;
    for (const auto& [key, floats] : values) {
      if (to == nullptr || floats.empty()) continue;
      std::memcpy(to, floats.data(), floats.size() * sizeof(float));
      to += floats.size() * sizeof(float);
    }
    return payload;
  }

  std::vector<SliceEntry> push(const Origin& origin, const Values& values) {
    std::vector<SliceEntry> entries;
    const BufferRef payload = receive(WriteKind::kPush, values, entries);
    shard.stage(origin, entries, payload);
    return entries;
  }
  std::vector<SliceEntry> initialise(const Values& values) {
    std::vector<SliceEntry> entries;
    const BufferRef payload = receive(WriteKind::kInit, values, entries);
    shard.initialise(entries, payload);
    return entries;
  }
  std::vector<SliceEntry> write(WriteKind kind, uint64_t sequence, const Values& values) {
    std::vector<SliceEntry> entries;
    const BufferRef payload = receive(kind, values, entries);
    shard.write(kind, "client", sequence, entries, payload);
    return entries;
  }

  // The value (part 0) or a state buffer, with the number of steps, of one slice.
  SliceEntry restore(uint64_t sequence, Key key, const Floats& floats, uint16_t part = 0,
                     uint64_t num_steps = 0) {
    const auto pool = make_pool();
    std::vector<SliceEntry> entries = entries_for({{key, floats}});
    entries[0].part = part;
    entries[0].version = num_steps;
    admit(shard, WriteKind::kRestore, entries, floats.size() * sizeof(float));
    shard.write(WriteKind::kRestore, "client", sequence, entries, buffer_of(*pool, floats));
    return entries[0];
  }

  Shard::Reply read(std::vector<SliceEntry>& entries) { return shard.read(entries, 64 << 20); }
  // The float32 value of one slice.
  Floats value(Key key) {
    std::vector<SliceEntry> entries(1);
    entries[0].key = key;
    const Shard::Reply reply = read(entries);
    EXPECT_EQ(entries[0].status, ErrorCode::OK);
    return elements_of(reply.pieces, reply.ready);
  }
  SliceEntry look(Key key, uint64_t version = 0) {
    std::vector<SliceEntry> entries(1);
    entries[0].key = key;
    entries[0].version = version;
    read(entries);
    return entries[0];
  }

  ShardOptions options() const {
    ShardOptions chosen;
    chosen.backend = make_backend(GetParam());
    return chosen;
  }

  Shard shard{options()};
};

}  // namespace psstore::testing
