// Many threads on one shard: workers, readers, writers, and whoever settles, defines, drops and counts.
//
// Every gradient is 1 and the rule is SGD with lr 1, so a slice at version v has to hold -v * kNumWorkers
// in each of its elements, whoever looks and whenever: a torn read, a lost or a doubled contribution
// would show. What the sanitizers add is that no access raced to get there.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <thread>

#include "shard.h"
#include "table_support.h"

namespace psstore::testing {
namespace {

constexpr uint32_t kNumWorkers = 3;
constexpr uint64_t kNumRounds = 200;
constexpr uint64_t kNumWrites = 1000;
constexpr uint64_t kScratchTensor = 1000;
// Some shared with readers as they are, some copied: kSharedValueBytes is 16384 floats.
constexpr size_t kSliceElems[] = {1, 100, 16384, 5000, 20000, 3};
constexpr Key kSumKey = make_key(500, 0);
constexpr size_t kSumElems = 700;

Key slice_key(size_t index) {
  return make_key(1, index);
}

class StressTest : public ::testing::Test {
 protected:
  StressTest() {
    TensorDefinition weights{1, DType::kFloat32, RuleKind::kSgd, 0, true, {}};
    for (size_t i = 0; i < std::size(kSliceElems); ++i) {
      weights.slices.push_back({slice_key(i), kSliceElems[i]});
    }
    shard.define(weights);
    shard.define({500, DType::kFloat32, RuleKind::kAdd, 0, true, {{kSumKey, kSumElems}}});
  }

  BufferRef admit_ones(WriteKind kind, std::vector<SliceEntry>& entries) {
    uint64_t num_bytes = 0;
    for (const SliceEntry& entry : entries) num_bytes += entry.num_bytes;
    BufferRef payload = shard.admit(kind, entries, num_bytes);
    const Floats ones(num_bytes / sizeof(float), 1);
    std::memcpy(payload->data(), ones.data(), num_bytes);
    return payload;
  }

  void push_all(const Origin& origin) {
    std::vector<SliceEntry> entries(std::size(kSliceElems));
    for (size_t i = 0; i < entries.size(); ++i) {
      entries[i].key = slice_key(i);
      entries[i].num_bytes = static_cast<uint32_t>(kSliceElems[i] * sizeof(float));
    }
    shard.stage(origin, entries, admit_ones(WriteKind::kPush, entries));
    for (const SliceEntry& entry : entries) EXPECT_EQ(entry.status, ErrorCode::OK);
  }

  void add_ones(const std::string& client, uint64_t sequence) {
    std::vector<SliceEntry> entries(1);
    entries[0].key = kSumKey;
    entries[0].num_bytes = kSumElems * sizeof(float);
    shard.write(WriteKind::kAdd, client, sequence, entries, admit_ones(WriteKind::kAdd, entries));
    EXPECT_EQ(entries[0].status, ErrorCode::OK);
  }

  struct Snapshot {
    std::vector<SliceEntry> entries;
    Shard::Reply reply;
  };

  Snapshot read_all() {
    Snapshot snapshot;
    snapshot.entries.resize(std::size(kSliceElems));
    for (size_t i = 0; i < snapshot.entries.size(); ++i) snapshot.entries[i].key = slice_key(i);
    snapshot.reply = shard.read(snapshot.entries, 64 << 20);
    return snapshot;
  }

  void check(const Snapshot& snapshot) {
    Floats all;
    for (const Piece& piece : snapshot.reply.pieces) {
      const Floats part = elements_of(piece.buffer->data(), piece.num_bytes);
      all.insert(all.end(), part.begin(), part.end());
    }
    auto from = all.begin();
    for (size_t i = 0; i < snapshot.entries.size(); ++i) {
      const auto to = from + static_cast<std::ptrdiff_t>(kSliceElems[i]);
      const float expected = -static_cast<float>(snapshot.entries[i].version * kNumWorkers);
      EXPECT_TRUE(std::all_of(from, to, [=](float value) { return value == expected; }))
          << "slice " << i << " at version " << snapshot.entries[i].version;
      from = to;
    }
  }

  // Pushes each round, twice now and then, carries the decision as all the others do, and must find
  // all slices at that decision: the next one needs this worker's push.
  void work(uint32_t rank) {
    std::vector<Member> members;
    for (uint64_t round = 1; round <= kNumRounds; ++round) {
      push_all({rank, 1, round});
      if ((round + rank) % 3 == 0) push_all({rank, 1, round});
      all_pushed.arrive_and_wait();
      members.clear();
      for (uint32_t other = 0; other < kNumWorkers; ++other)
        members.push_back(member(other, round));
      shard.advance(decision(round, members));
      if ((round + rank) % 4 == 0) push_all({rank, 1, round});
      const Snapshot snapshot = read_all();
      for (const SliceEntry& entry : snapshot.entries) EXPECT_EQ(entry.version, round);
      check(snapshot);
    }
  }

  // Holds each snapshot while the next one is read, and looks at both.
  void follow() {
    Snapshot held = read_all();
    while (!done) {
      Snapshot next = read_all();
      for (size_t i = 0; i < next.entries.size(); ++i) {
        EXPECT_GE(next.entries[i].version, held.entries[i].version);
      }
      check(held);
      check(next);
      held = std::move(next);
    }
  }

  void write(const std::string& client) {
    for (uint64_t sequence = 1; sequence <= kNumWrites; ++sequence) {
      add_ones(client, sequence);
      if (sequence % 5 == 0) add_ones(client, sequence);
    }
    EXPECT_EQ(shard.last_sequence(client), kNumWrites);
  }

  void administer() {
    for (uint64_t id = kScratchTensor; !done; ++id) {
      shard.define({id, DType::kFloat64, RuleKind::kAssign, 3, true, {{make_key(id, 0), 10}}});
      shard.drop(id);
      shard.settle(1);
      EXPECT_LE(shard.stats().at("slots"), std::size(kSliceElems) + 1);
      EXPECT_EQ(shard.state(slice_key(0)).size(), 2U);
      std::this_thread::yield();
    }
  }

  Shard shard{ShardOptions{0, 4, true}};  // few stripes, so that threads meet
  std::barrier<> all_pushed{kNumWorkers};
  std::atomic<bool> done{false};
};

TEST_F(StressTest, EveryVersionIsSeenWholeAndEveryContributionCountsOnce) {
  std::vector<std::thread> busy;
  for (uint32_t rank = 0; rank < kNumWorkers; ++rank) busy.emplace_back([=, this] { work(rank); });
  for (const char* client : {"a", "b"}) busy.emplace_back([=, this] { write(client); });
  std::vector<std::thread> until_done;
  for (int i = 0; i < 2; ++i) until_done.emplace_back([this] { follow(); });
  until_done.emplace_back([this] { administer(); });

  for (std::thread& thread : busy) thread.join();
  done = true;
  for (std::thread& thread : until_done) thread.join();

  std::vector<SliceEntry> sum(1);
  sum[0].key = kSumKey;
  const Shard::Reply reply = shard.read(sum, 64 << 20);
  EXPECT_EQ(elements_of(reply.pieces[0].buffer->data(), reply.payload_bytes),
            Floats(kSumElems, 2 * kNumWrites));
  EXPECT_EQ(shard.version(), kNumRounds);
  EXPECT_EQ(shard.stats().at("staged_bytes"), 0U);
}

}  // namespace
}  // namespace psstore::testing
