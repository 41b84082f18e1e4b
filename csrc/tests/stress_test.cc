// Many threads on one shard: workers, readers, writers, and whoever settles, defines, drops, restores and
// counts. Rounds are decided in turn as ever, early, and with a scale.
//
// Every gradient comes to 1 and the rule is SGD with lr 1, so a slice at version v has to hold
// -v * kNumWorkers in each of its elements, whoever looks and whenever: a torn read, a lost or a doubled
// contribution would show. What the sanitizers add is that no access raced to get there.
#include <atomic>
#include <barrier>
#include <span>
#include <thread>

#include "admit.h"
#include "random_floats.h"
#include "shard/shard.h"
#include "table_support.h"

namespace psstore::testing {
namespace {

constexpr uint32_t kNumWorkers = 3;
// Where a lock of the shard is left out that the thread sanitizer misses, it does so in the first few rounds, or not in 200.
constexpr uint64_t kNumRounds = 60;
constexpr uint64_t kNumWrites = 300;
constexpr uint64_t kScratchTensor = 1000;
// Some shared with readers as they are, some copied: kSharedValueBytes is 16384 floats.
constexpr size_t kSliceElems[] = {1, 100, 16384, 5000, 20000, 3};
constexpr Key kSumKey = make_key(500, 0);
constexpr size_t kSumElems = 700;

constexpr double kScale = 0.5;

Key slice_key(size_t index) {
  return make_key(1, index);
}

// Shared with readers; its state is restored all the time, and used by no step (there is no momentum).
const Key kRestoredKey = slice_key(2);
constexpr size_t kRestoredElems = kSliceElems[2];

Open open_in(uint64_t round) {
  constexpr Open kTurns[] = {Open::kNothing, Open::kContributions, Open::kScale};
  return kTurns[round % std::size(kTurns)];
}

Decision decision_on(uint64_t round) {
  std::vector<Member> members;
  for (uint32_t rank = 0; rank < kNumWorkers; ++rank) members.push_back(member(rank, round));
  return open_decision(round, members, open_in(round));
}

float gradient_in(uint64_t round) {
  return open_in(round) == Open::kScale ? static_cast<float>(1 / kScale) : 1;
}

std::vector<SliceEntry> entries_of_all() {
  std::vector<SliceEntry> entries(std::size(kSliceElems));
  for (size_t i = 0; i < entries.size(); ++i) entries[i].key = slice_key(i);
  return entries;
}

class StressTest : public OnDevices {
 protected:
  StressTest() {
    TensorDefinition weights{1, DType::kFloat32, RuleKind::kSgd, 0, true, {}};
    for (size_t i = 0; i < std::size(kSliceElems); ++i) {
      weights.slices.push_back({slice_key(i), kSliceElems[i]});
    }
    shard.define(weights);
    shard.define({500, DType::kFloat32, RuleKind::kAdd, 0, true, {{kSumKey, kSumElems}}});
  }

  BufferRef admit_filled(WriteKind kind, std::vector<SliceEntry>& entries, float element) {
    uint64_t num_bytes = 0;
    for (const SliceEntry& entry : entries) num_bytes += entry.num_bytes;
    BufferRef payload = admit(shard, kind, entries, num_bytes);
    const Floats elements(num_bytes / sizeof(float), element);
    std::memcpy(payload->data(), elements.data(), num_bytes);
    return payload;
  }

  void push_all(const Origin& origin) {
    std::vector<SliceEntry> entries = entries_of_all();
    for (size_t i = 0; i < entries.size(); ++i) {
      entries[i].num_bytes = static_cast<uint32_t>(kSliceElems[i] * sizeof(float));
    }
    shard.stage(origin, entries,
                admit_filled(WriteKind::kPush, entries, gradient_in(origin.round)));
    for (const SliceEntry& entry : entries) EXPECT_EQ(entry.status, ErrorCode::OK);
  }

  void add_ones(const std::string& client, uint64_t sequence) {
    std::vector<SliceEntry> entries(1);
    entries[0].key = kSumKey;
    entries[0].num_bytes = kSumElems * sizeof(float);
    shard.write(WriteKind::kAdd, client, sequence, entries,
                admit_filled(WriteKind::kAdd, entries, 1));
    EXPECT_EQ(entries[0].status, ErrorCode::OK);
  }

  struct Snapshot {
    std::vector<SliceEntry> entries;
    Shard::Reply reply;
  };

  Snapshot read_all() {
    Snapshot snapshot{entries_of_all(), {}};
    snapshot.reply = shard.read(snapshot.entries, 64 << 20);
    return snapshot;
  }

  void check(const Snapshot& snapshot) {
    const Floats all = elements_of(snapshot.reply.pieces, snapshot.reply.ready);
    const std::span<const float> elements(all);
    size_t begin = 0;
    for (size_t i = 0; i < snapshot.entries.size(); ++i) {
      if (snapshot.entries[i].status == ErrorCode::NOT_APPLIED) continue;
      const float expected = -static_cast<float>(snapshot.entries[i].version * kNumWorkers);
      EXPECT_TRUE(all_equal(elements.subspan(begin, kSliceElems[i]), expected))
          << "slice " << i << " at version " << snapshot.entries[i].version;
      begin += kSliceElems[i];
    }
  }

  void check_norms() {
    std::vector<SliceEntry> entries = entries_of_all();
    const Shard::Reply reply = shard.norms(entries);
    const auto sums = elements_of<double>(reply.pieces, reply.ready);
    ASSERT_EQ(sums.size(), std::size(kSliceElems));
    for (size_t i = 0; i < sums.size(); ++i) {
      const double element = kNumWorkers / kScale;
      EXPECT_EQ(sums[i], element * element * static_cast<double>(kSliceElems[i]));
    }
  }

  void restore_state(uint64_t sequence) {
    std::vector<SliceEntry> entries(1);
    entries[0].key = kRestoredKey;
    entries[0].part = 1;
    entries[0].num_bytes = kRestoredElems * sizeof(float);
    const auto element = static_cast<float>(sequence);
    shard.write(WriteKind::kRestore, "restorer", sequence, entries,
                admit_filled(WriteKind::kRestore, entries, element));
    EXPECT_TRUE(entries[0].status == ErrorCode::OK || entries[0].status == ErrorCode::NOT_APPLIED);
  }

  struct RestoredState {
    SliceEntry entry;
    Shard::Reply reply;
  };

  RestoredState read_state() {
    std::vector<SliceEntry> entries(1);
    entries[0].key = kRestoredKey;
    entries[0].part = 1;
    Shard::Reply reply = shard.read(entries, 64 << 20);
    return {entries[0], std::move(reply)};
  }

  void check(const RestoredState& state) {
    if (state.reply.pieces.empty()) return;
    const Floats elements = elements_of(state.reply.pieces, state.reply.ready);
    ASSERT_EQ(elements.size(), kRestoredElems);
    EXPECT_TRUE(all_equal<float>(elements, elements[0]));
  }

  // Once, or twice now and then.
  void push_round(uint32_t rank, uint64_t round) {
    push_all({rank, 1, round});
    if ((round + rank) % 3 == 0) push_all({rank, 1, round});
  }

  // Each worker carries the decision as all the others do, once all have committed.
  void take_round(uint32_t rank, uint64_t round) {
    const Decision made = decision_on(round);
    if (made.early()) {
      all_committed.arrive_and_wait();
      if ((round + rank) % 2 == 0) shard.advance(made);
      push_round(rank, round);
      shard.advance(made);
      all_finished.arrive_and_wait();
      return;
    }
    push_round(rank, round);
    all_committed.arrive_and_wait();
    shard.advance(made);
    if (!made.needs_scale()) return;
    check_norms();
    shard.set_scale(round, kScale);
    check_norms();
  }

  // Must find all slices at the decision: the next one needs this worker's commit.
  void work(uint32_t rank) {
    for (uint64_t round = 1; round <= kNumRounds; ++round) {
      take_round(rank, round);
      if ((round + rank) % 4 == 0) push_all({rank, 1, round});
      const Snapshot snapshot = read_all();
      for (const SliceEntry& entry : snapshot.entries) EXPECT_EQ(entry.version, round);
      check(snapshot);
    }
  }

  // Holds each snapshot while the next one is read, and looks at both.
  void follow() {
    Snapshot held = read_all();
    RestoredState held_state = read_state();
    while (!done) {
      Snapshot next = read_all();
      RestoredState next_state = read_state();
      for (size_t i = 0; i < next.entries.size(); ++i) {
        EXPECT_GE(next.entries[i].version, held.entries[i].version);
      }
      check(held);
      check(next);
      check(held_state);
      check(next_state);
      held = std::move(next);
      held_state = std::move(next_state);
    }
  }

  void write(const std::string& client) {
    for (uint64_t sequence = 1; sequence <= kNumWrites; ++sequence) {
      add_ones(client, sequence);
      if (sequence % 5 == 0) add_ones(client, sequence);
    }
    EXPECT_EQ(shard.last_sequence(client), kNumWrites);
  }

  void restore() {
    for (uint64_t sequence = 1; !done; ++sequence) {
      restore_state(sequence);
      if (sequence % 5 == 0) restore_state(sequence);
      std::this_thread::yield();
    }
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

  // Few stripes, so that threads meet.
  Shard shard{ShardOptions{0, 4, true, nullptr, make_backend(GetParam())}};
  std::barrier<> all_committed{kNumWorkers};
  std::barrier<> all_finished{kNumWorkers};
  std::atomic<bool> done{false};
};

PSSTORE_ON_DEVICES(StressTest);

TEST_P(StressTest, EveryVersionIsSeenWholeAndEveryContributionCountsOnce) {
  std::vector<std::thread> busy;
  for (uint32_t rank = 0; rank < kNumWorkers; ++rank) busy.emplace_back([=, this] { work(rank); });
  for (const char* client : {"a", "b"}) busy.emplace_back([=, this] { write(client); });
  std::vector<std::thread> until_done;
  for (int i = 0; i < 2; ++i) until_done.emplace_back([this] { follow(); });
  until_done.emplace_back([this] { restore(); });
  until_done.emplace_back([this] { administer(); });

  for (std::thread& thread : busy) thread.join();
  done = true;
  for (std::thread& thread : until_done) thread.join();

  std::vector<SliceEntry> sum(1);
  sum[0].key = kSumKey;
  const Shard::Reply reply = shard.read(sum, 64 << 20);
  EXPECT_EQ(elements_of(reply.pieces, reply.ready), Floats(kSumElems, 2 * kNumWrites));
  EXPECT_EQ(shard.version(), kNumRounds);
  EXPECT_EQ(shard.stats().at("staged_bytes"), 0U);
  EXPECT_EQ(shard.stats().at("held_slots"), 0U);
}

}  // namespace
}  // namespace psstore::testing
