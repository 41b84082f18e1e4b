// A shard on a device does what one on the host does, byte by byte, whenever the device does its work; and
// says what it can't.
//
// The same calls go to both shards. Replies of the device are looked at some calls later, payloads are let go
// of at once, and their memory is written again by the next call: what a fence has to keep shows here when
// it does not.
#include <algorithm>
#include <array>
#include <deque>
#include <limits>
#include <optional>
#include <random>

#include "shard/shard.h"
#include "shard_support.h"
#include "table/published.h"

namespace psstore::testing {
namespace {

constexpr uint64_t kSeeds = 12;
constexpr size_t kNumRounds = 8;
constexpr uint32_t kNumWorkers = 2;
constexpr size_t kLatestReplies = 3;
// A slice that readers of the host share, and small ones.
constexpr size_t kSliceElems[] = {20000, 3, 700};
constexpr Key kSum = make_key(2, 0);

ShardOptions options_on(const std::string& device) {
  ShardOptions options;
  options.backend = make_backend(device);
  return options;
}

std::map<std::string, double> adam() {
  return {{"lr", 0.1},           {"beta1", 0.9},   {"beta2", 0.99}, {"eps", 1e-8},
          {"weight_decay", 0.1}, {"amsgrad", 0.0}, {"maximize", 0}};
}

class DeviceBackendTest : public ::testing::Test {
 protected:
  // Two shards that are told the same.
  struct Pair {
    explicit Pair(uint64_t seed)
        : host(options_on("cpu")),
          device(options_on("fake:0?seed=" + std::to_string(seed))),
          random(seed) {
      TensorDefinition weights{1, DType::kFloat32, RuleKind::kAdam, 0, true, {}};
      for (size_t i = 0; i < std::size(kSliceElems); ++i) {
        weights.slices.push_back({make_key(1, i), kSliceElems[i]});
      }
      for (Shard* shard : {&host, &device}) {
        shard->define(weights);
        shard->define({2, DType::kFloat32, RuleKind::kAdd, 0, true, {{kSum, 5}}});
      }
    }

    Shard host;
    Shard device;
    std::mt19937_64 random;
    uint64_t num_writes = 0;
    std::deque<std::pair<std::vector<std::byte>, Shard::Reply>> replies;
    std::array<uint64_t, std::size(kSliceElems)> followed{};  // versions
    size_t num_deltas = 0;

    static std::vector<SliceEntry> entries() {
      std::vector<SliceEntry> made(std::size(kSliceElems));
      for (size_t i = 0; i < made.size(); ++i) {
        made[i].key = make_key(1, i);
        made[i].num_bytes = static_cast<uint32_t>(kSliceElems[i] * sizeof(float));
      }
      return made;
    }
    Floats numbers(size_t count) {
      Floats made(count);
      for (float& number : made) number = static_cast<float>(random() % 2001) / 1000 - 1;
      return made;
    }
    static BufferRef received(Shard& shard, WriteKind kind, std::vector<SliceEntry>& entries,
                              const Floats& values) {
      BufferRef payload = admit(shard, kind, entries, values.size() * sizeof(float));
      std::memcpy(payload->data(), values.data(), payload->size());
      return payload;
    }

    void push(uint32_t rank, uint64_t round) {
      size_t count = 0;
      for (const size_t elems : kSliceElems) count += elems;
      const Floats gradient = numbers(count);
      for (Shard* shard : {&host, &device}) {
        std::vector<SliceEntry> made = entries();
        const BufferRef payload = received(*shard, WriteKind::kPush, made, gradient);
        shard->stage({rank, 1, round}, made, payload);
        EXPECT_EQ(statuses_of(made), std::vector<ErrorCode>(made.size(), ErrorCode::OK));
      }
    }
    void add() {
      const Floats addend = numbers(10);
      ++num_writes;
      for (Shard* shard : {&host, &device}) {
        std::vector<SliceEntry> made = entries_for({{kSum, Floats(5)}, {kSum, Floats(5)}});
        const BufferRef payload = received(*shard, WriteKind::kAdd, made, addend);
        shard->write(WriteKind::kAdd, "client", num_writes, made, payload);
      }
    }
    void restore() {
      const Floats values = numbers(kSliceElems[2]);
      ++num_writes;
      for (Shard* shard : {&host, &device}) {
        std::vector<SliceEntry> made = entries_for({{make_key(1, 2), values}});
        const BufferRef payload = received(*shard, WriteKind::kRestore, made, values);
        shard->write(WriteKind::kRestore, "client", num_writes, made, payload);
      }
    }
    void decide(uint64_t number, bool clipped) {
      std::vector<Member> members;
      for (uint32_t rank = 0; rank < kNumWorkers; ++rank) members.push_back(member(rank, number));
      const Decision made(number, false, kNumWorkers, members, {{0, adam()}},
                          clipped ? Open::kScale : Open::kNothing);
      host.advance(made);
      device.advance(made);
      if (!clipped) return;
      if (random() % 2 == 0) norms();
      host.set_scale(number, 0.5);
      device.set_scale(number, 0.5);
    }
    void norms() {
      std::vector<SliceEntry> here = entries();
      std::vector<SliceEntry> there = entries();
      const Shard::Reply expected = host.norms(here);
      keep(bytes_of(expected), device.norms(there));
    }
    void read(DType wanted) {
      std::vector<SliceEntry> here = entries();
      here.push_back(entries_for({{kSum, Floats(5)}})[0]);
      for (SliceEntry& entry : here) entry.dtype = wanted;
      std::vector<SliceEntry> there = here;
      const Shard::Reply expected = host.read(here, 64 << 20);
      keep(bytes_of(expected), device.read(there, 64 << 20));
      for (size_t i = 0; i < here.size(); ++i) EXPECT_EQ(here[i].version, there[i].version);
    }

    // As somebody does who has what the host has published. A change that the payload does not say is not one here:
    // gradients are finite.
    void follow(DType encoding) {
      std::vector<SliceEntry> here = entries();
      for (size_t i = 0; i < here.size(); ++i) {
        here[i].dtype = encoding;
        here[i].version = followed[i] + 1;
      }
      std::vector<SliceEntry> there = here;
      const Shard::Reply expected = host.read(here, 64 << 20);
      keep(bytes_of(expected), device.read(there, 64 << 20));
      for (size_t i = 0; i < here.size(); ++i) {
        EXPECT_EQ(here[i].version, there[i].version);
        EXPECT_EQ(here[i].dtype, there[i].dtype);
        num_deltas += is_encoding(here[i].dtype) && here[i].num_bytes > 0 ? 1 : 0;
        followed[i] = here[i].version;
      }
    }

    static std::vector<std::byte> bytes_of(const Shard::Reply& reply) {
      return elements_of<std::byte>(reply.pieces, reply.ready);
    }
    // Some are never looked at, as of a connection that is gone.
    void keep(std::vector<std::byte> expected, Shard::Reply reply) {
      if (random() % 4 != 0) replies.emplace_back(std::move(expected), std::move(reply));
      while (replies.size() > kLatestReplies) check_first();
    }
    void check_first() {
      EXPECT_TRUE(replies.front().first == bytes_of(replies.front().second));
      replies.pop_front();
    }
  };
};

TEST_F(DeviceBackendTest, HasTheBytesOfTheHostWheneverTheWorkIsDone) {
  for (uint64_t seed = 0; seed < kSeeds && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    Pair pair(seed);
    for (uint64_t round = 1; round <= kNumRounds; ++round) {
      for (uint32_t rank = 0; rank < kNumWorkers; ++rank) {
        pair.push(rank, round);
        if (pair.random() % 3 == 0) pair.push(rank, round);
      }
      pair.add();
      pair.decide(round, pair.random() % 3 == 0);
      if (pair.random() % 2 == 0) pair.device.settle(-1);
      if (pair.random() % 4 == 0) pair.restore();
      pair.add();
      if (pair.random() % 3 != 0) pair.read(DType::kFloat32);
      if (pair.random() % 3 == 0) pair.read(DType::kBFloat16);
      if (pair.random() % 3 != 0) pair.follow(DType::kInt8);
      if (pair.random() % 8 == 0) pair.follow(DType::kSign);
    }
    EXPECT_GT(pair.num_deltas, 0U);
    pair.read(DType::kFloat32);
    while (!pair.replies.empty()) pair.check_first();
    for (size_t i = 0; i < std::size(kSliceElems); ++i) {
      EXPECT_TRUE(pair.host.state(make_key(1, i)) == pair.device.state(make_key(1, i)));
    }
  }
}

TEST_F(DeviceBackendTest, TakesAllReadySlotsOfACallInOneLaunch) {
  // A launch is one piece of a fake device's work, and so is a copy. Two slots without value, one frame for
  // both: what it does is one upload, two copies of first values, one upload and one launch.
  Shard shard(options_on("fake:0?fail_after=5"));
  shard.define(
      {1, DType::kFloat32, RuleKind::kSgd, 0, false, {{make_key(1, 0), 1}, {make_key(1, 1), 1}}});
  std::vector<SliceEntry> entries = entries_for({{make_key(1, 0), {5}}, {make_key(1, 1), {7}}});
  BufferRef payload = admit(shard, WriteKind::kInit, entries, 8);
  shard.initialise(entries, payload);
  entries = entries_for({{make_key(1, 0), {5}}, {make_key(1, 1), {7}}});
  payload = admit(shard, WriteKind::kPush, entries, 8);
  shard.stage({0, 1, 1}, entries, payload);
  shard.advance(decision(1, {member(0, 1)}));
  shard.settle(-1);
  entries = std::vector<SliceEntry>(1);
  entries[0].key = make_key(1, 0);
  // The copy out of the value is the sixth.
  error_of(ErrorCode::DEVICE_FAILED, [&] { shard.read(entries, 64).ready->wait(); });
}

// Shards that are told the same steps, of a gradient that may be anything, and asked for changes.
class DeviceFollowingTest : public ::testing::Test {
 protected:
  static constexpr size_t kElems = 700;
  static constexpr size_t kSlots = 3;

  void define(const std::string& device) {
    shard.emplace(options_on(device));
    TensorDefinition weights{1, DType::kFloat32, RuleKind::kSgd, 0, true, {}};
    for (size_t i = 0; i < kSlots; ++i) weights.slices.push_back({make_key(1, i), kElems});
    shard->define(weights);
  }
  std::vector<SliceEntry> entries(DType dtype, uint64_t version) {
    std::vector<SliceEntry> made(kSlots);
    for (size_t i = 0; i < kSlots; ++i) {
      made[i].key = make_key(1, i);
      made[i].dtype = dtype;
      made[i].version = version;
    }
    return made;
  }
  void step(uint64_t number, const Floats& gradient) {
    Floats all;
    for (size_t i = 0; i < kSlots; ++i) all.insert(all.end(), gradient.begin(), gradient.end());
    std::vector<SliceEntry> made = entries(DType::kFloat32, 0);
    for (SliceEntry& entry : made) entry.num_bytes = kElems * sizeof(float);
    const BufferRef payload = admit(*shard, WriteKind::kPush, made, all.size() * sizeof(float));
    std::memcpy(payload->data(), all.data(), payload->size());
    shard->stage({0, 1, number}, made, payload);
    shard->advance(decision(number, {member(0, number)}));
  }
  // What came, as whoever sends it sees it.
  std::vector<std::byte> pull(std::vector<SliceEntry>& asked, bool whole = false) {
    const Shard::Reply reply = shard->read(asked, 64 << 20, {.share = true, .whole = whole});
    EXPECT_FALSE(reply.shared);
    return elements_of<std::byte>(reply.pieces, reply.ready);
  }

  std::optional<Shard> shard;
};

TEST_F(DeviceFollowingTest, ChangesOfACallAreAFewLaunches) {
  // Zeros are three pieces of work, and what is pushed is one. All steps are a launch, and so are all changes; a launch
  // that gathers small pieces and one copy bring them to the host.
  const auto pulled = [&](const std::string& device, size_t num_steps) {
    define(device);
    std::vector<SliceEntry> asked = entries(DType::kInt8, 0);
    pull(asked);  // another two
    for (uint64_t number = 1; number <= num_steps; ++number) {
      step(number, Floats(kElems, 1.0F));
      asked = entries(DType::kInt8, number);
      pull(asked);
    }
    return asked[0].dtype;
  };
  EXPECT_EQ(pulled("fake:0?fail_after=10", 1), DType::kInt8);
  EXPECT_EQ(pulled("fake:0?fail_after=15", 2), DType::kInt8);
  error_of(ErrorCode::DEVICE_FAILED, [&] { pulled("fake:0?fail_after=14", 2); });
}

// Threads of an embedded store give work as it comes: a step may follow a change, and a change a change, in one run.
TEST(DeviceBackendOrderTest, ChangesComeBetweenTheStepsThatTheyTellOf) {
  constexpr int64_t kElems = 300;
  constexpr size_t kBytes = kElems * sizeof(float);
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    DeviceBackend backend(device::open_device("fake:0?seed=" + std::to_string(seed)));
    const BufferRef value = backend.allocate(kBytes);
    const BufferRef first = backend.allocate(kBytes);
    for (const BufferRef& buffer : {value, first}) backend.zero(buffer->data(), kBytes);
    const BufferRef second = backend.allocate(kBytes);
    const BufferRef payload = backend.allocate(encoded_bytes(DType::kInt8, kElems));
    const BufferRef other = backend.allocate(encoded_bytes(DType::kInt8, kElems));
    const BufferRef addend = brought_to(backend, Floats(kElems, 127.0F));
    const Contribution contribution{.data = addend->data()};
    const auto step = [&] {
      backend.reduce_update({.rule = RuleKind::kAdd,
                             .num_elems = kElems,
                             .contributions = {&contribution, 1},
                             .value_in = value->data(),
                             .value_out = value->data()});
    };
    const auto floats = [&](const BufferRef& buffer) {
      const std::string bytes = backend.bytes_of(buffer, kBytes);
      return elements_of<float>(bytes.data(), bytes.size());
    };
    const auto change = [&](const BufferRef& base, const BufferRef& next, const BufferRef& to) {
      EXPECT_TRUE(backend.encode_change(base->data(), {.encoding = DType::kInt8,
                                                       .source = value->data(),
                                                       .base = next->data(),
                                                       .num_elems = kElems,
                                                       .payload = to->data()}));
    };
    step();
    backend.flush();
    change(first, first, payload);
    step();
    EXPECT_EQ(floats(first), Floats(kElems, 127.0F));
    change(first, first, payload);
    change(first, second, other);  // there is none left
    EXPECT_EQ(floats(second), Floats(kElems, 254.0F));
    const size_t num_bytes = encoded_bytes(DType::kInt8, kElems);
    EXPECT_EQ(backend.bytes_of(other, num_bytes), std::string(num_bytes, '\0'));
  }
}

TEST_F(DeviceFollowingTest, AChangeThatIsNotFiniteIsSeenWhenItIsThereAndReadWhole) {
  Floats gradient(kElems, 1.0F);
  gradient[300] = std::numeric_limits<float>::infinity();
  for (const DType encoding : {DType::kInt8, DType::kSign}) {
    define("fake:0?seed=3");
    std::vector<SliceEntry> asked = entries(encoding, 0);
    EXPECT_TRUE(say_changes(asked, pull(asked)));
    step(1, Floats(kElems, 2.0F));
    asked = entries(encoding, 1);
    EXPECT_TRUE(say_changes(asked, pull(asked)));
    EXPECT_EQ(asked[0].dtype, encoding);
    step(2, gradient);
    asked = entries(encoding, 2);
    const std::vector<std::byte> unsaid = pull(asked);
    EXPECT_FALSE(say_changes(asked, unsaid));
    asked = entries(encoding, 2);
    const std::vector<std::byte> whole = pull(asked, /*whole=*/true);
    EXPECT_EQ(asked[0].dtype, DType::kFloat32);
    asked = entries(DType::kFloat32, 0);
    EXPECT_EQ(whole, pull(asked));
  }
}

TEST_F(DeviceFollowingTest, WhoHasNoRoomForWhatIsPublishedSendsValues) {
  define("fake:0?bytes=8388608");
  shard->backend()->reserve(
      6'700'000);  // four fifths are for slots, and so taken but for one value
  std::vector<SliceEntry> asked;
  for (uint64_t number = 1; number <= 3; ++number) {
    step(number, Floats(kElems, 1.0F));
    asked = entries(DType::kSign, number);
    pull(asked);
    EXPECT_EQ(asked[0].dtype, DType::kFloat32);
  }
  EXPECT_EQ(shard->stats()["published_bytes"], 0U);
}

TEST_F(DeviceBackendTest, RefusesAStepWhoseStateDoesNotFitBeforeItChangesAnything) {
  constexpr uint64_t kElems = 60'000;
  Shard shard(options_on("fake:0?bytes=1048576"));  // room for three such tensors or states
  const auto define = [&](uint64_t id) {
    shard.define({id, DType::kFloat32, RuleKind::kSgd, 0, true, {{make_key(id, 0), kElems}}});
  };
  const auto decide = [&](uint64_t number, double momentum) {
    shard.advance(Decision(number, false, 1, {member(0, number)}, {{0, sgd(1.0, momentum)}}));
  };
  const auto push = [&](uint64_t id, uint64_t round) {
    std::vector<SliceEntry> entries = entries_for({{make_key(id, 0), Floats(kElems, 1.0F)}});
    const BufferRef payload = admit(shard, WriteKind::kPush, entries, kElems * sizeof(float));
    std::ranges::fill(std::span(reinterpret_cast<float*>(payload->data()), kElems), 1.0F);
    shard.stage({0, 1, round}, entries, payload);
  };
  define(1);
  define(2);
  const auto values = std::pair(shard.state(make_key(1, 0)), shard.state(make_key(2, 0)));
  push(1, 1);
  push(2, 1);
  error_of(ErrorCode::OUT_OF_MEMORY, [&] { decide(1, 0.9); });
  EXPECT_EQ(shard.version(), 0U);
  EXPECT_EQ(std::pair(shard.state(make_key(1, 0)), shard.state(make_key(2, 0))), values);
  shard.drop(2);
  decide(1, 0.9);
  EXPECT_NE(shard.state(make_key(1, 0)), values.first);
  error_of(ErrorCode::OUT_OF_MEMORY, [&] { define(3); });  // with the momentum of its group
  shard.drop(1);
  define(4);
}

TEST_F(DeviceBackendTest, RefusesATensorThatDoesNotFitAndKeepsTheOthers) {
  Shard shard(options_on("fake:0?bytes=1048576"));
  const auto define = [&](uint64_t id, uint64_t num_elems) {
    shard.define({id, DType::kFloat32, RuleKind::kAdam, 0, true, {{make_key(id, 0), num_elems}}});
  };
  define(1, 1 << 15);  // 384 KiB with its state
  const std::string message =
      error_of(ErrorCode::OUT_OF_MEMORY, [&] { define(2, (1 << 15) + (1 << 13)); });
  EXPECT_NE(message.find("fake:0"), std::string::npos) << message;
  EXPECT_EQ(shard.stats().at("slots"), 1U);
  shard.drop(1);
  define(3, (1 << 15) + (1 << 13));  // now it does
  EXPECT_EQ(shard.stats().at("slots"), 1U);
}

TEST_F(DeviceBackendTest, RefusesAPushThatDoesNotFitAndTakesItLater) {
  Shard shard(options_on("fake:0?bytes=65600"));
  shard.define({1, DType::kFloat32, RuleKind::kSgd, 0, true, {{make_key(1, 0), 4096}}});
  const Values gradient{{make_key(1, 0), Floats(4096, 1)}};
  const auto push = [&](uint32_t rank) {
    std::vector<SliceEntry> entries = entries_for(gradient);
    const BufferRef payload = admit(shard, WriteKind::kPush, entries, 16384);
    std::memcpy(payload->data(), gradient[0].second.data(), 16384);
    shard.stage({rank, 1, 1}, entries, payload);
  };
  push(0);
  push(1);
  push(2);  // it is full: 16 KiB of value, 48 KiB of contributions, a launch's table
  error_of(ErrorCode::OUT_OF_MEMORY, [&] { push(3); });
  shard.advance(decision(1, {member(0, 1), member(1, 1), member(2, 1)}));
  shard.settle(-1);
  push(3);  // of a round that is still open for it
  EXPECT_EQ(elements_of(shard.state(make_key(1, 0))[0].second.data(), 4), (Floats{-3}));
}

// A device whose memory is all taken, by others too, and a shard whose launches have had no table yet.
class FullDeviceTest : public ::testing::Test {
 protected:
  FullDeviceTest() {
    shard.define({2, DType::kFloat32, RuleKind::kAdd, 0, true, {{kSum, 1}}});
    shard.define({3, DType::kFloat32, RuleKind::kSgd, 0, true, {{kWeight, 1}}});
  }
  ~FullDeviceTest() override { device->free(others); }

  void take_the_rest() { others = device->allocate(device->memory().free_bytes); }
  void leave_some() { device->free(std::exchange(others, nullptr)); }

  std::vector<SliceEntry> sent(WriteKind kind, Key key, uint64_t number) {
    std::vector<SliceEntry> entries = entries_for({{key, {1}}});
    const BufferRef payload = admit(shard, kind, entries, sizeof(float));
    const float one = 1;
    std::memcpy(payload->data(), &one, sizeof(one));
    if (kind == WriteKind::kPush) {
      shard.stage({0, 1, number}, entries, payload);
    } else {
      shard.write(kind, "client", number, entries, payload);
    }
    return entries;
  }
  Floats value_of(Key key) {
    std::vector<SliceEntry> entries(1);
    entries[0].key = key;
    const Shard::Reply reply = shard.read(entries, 64);
    return elements_of(reply.pieces, reply.ready);
  }

  static constexpr Key kWeight = make_key(3, 0);
  const std::shared_ptr<device::Device> device = device::open_device("fake:0?bytes=6291456");
  const std::shared_ptr<DeviceBackend> backend = std::make_shared<DeviceBackend>(device);
  Shard shard{[this] {
    ShardOptions options;
    options.backend = backend;
    return options;
  }()};
  std::byte* others = nullptr;
};

TEST_F(FullDeviceTest, AShardsIdleMemoryIsThereForLaunches) {
  {
    const BufferRef first = backend->allocate(2'000'000);
    const BufferRef second = backend->allocate(2'000'000);
  }
  for (int i = 0; i < 20; ++i) backend->flush();
  take_the_rest();
  const size_t idle_bytes = backend->pool_idle_bytes();
  EXPECT_GT(idle_bytes, 4'000'000U);
  EXPECT_EQ(sent(WriteKind::kAdd, kSum, 1)[0].status, ErrorCode::OK);
  EXPECT_LT(backend->pool_idle_bytes(), idle_bytes);
  EXPECT_EQ(value_of(kSum), Floats{1});
}

TEST_F(FullDeviceTest, AWriteThatCanNotBeginIsTakenAndBeginsLater) {
  const BufferRef first = backend->allocate(1);  // of a block that has room for the slots
  take_the_rest();
  EXPECT_EQ(sent(WriteKind::kAdd, kSum, 1)[0].status, ErrorCode::OK);
  EXPECT_EQ(sent(WriteKind::kAdd, kSum, 1)[0].status, ErrorCode::OK);
  EXPECT_EQ(shard.stats().at("duplicates"), 1U);
  error_of(ErrorCode::OUT_OF_MEMORY, [&] { value_of(kSum); });
  leave_some();
  EXPECT_EQ(value_of(kSum), Floats{1});
}

TEST_F(FullDeviceTest, ADecisionStandsWhoseStepCanNotBegin) {
  const BufferRef first = backend->allocate(1);
  take_the_rest();
  for (uint64_t round = 1; round <= 2; ++round) {
    EXPECT_EQ(sent(WriteKind::kPush, kWeight, round)[0].status, ErrorCode::OK);
    shard.advance(decision(round, {member(0, round)}));
  }
  EXPECT_EQ(shard.stats().at("decisions"), 2U);
  EXPECT_EQ(sent(WriteKind::kPush, kWeight, 2)[0].status, ErrorCode::OK);
  EXPECT_EQ(shard.stats().at("duplicates"), 1U);
  leave_some();
  EXPECT_EQ(value_of(kWeight), Floats{-2});
}

TEST_F(DeviceBackendTest, SaysWhichDeviceFailedAtEveryCallFromThenOn) {
  Shard shard(options_on("fake:5?fail_after=0"));
  shard.define({1, DType::kFloat32, RuleKind::kAssign, 0, true, {{make_key(1, 0), 1}}});
  for (int call = 0; call < 2; ++call) {
    const std::string message =
        error_of(ErrorCode::DEVICE_FAILED, [&] { shard.state(make_key(1, 0)); });
    EXPECT_NE(message.find("fake:5"), std::string::npos) << message;
  }
}

}  // namespace
}  // namespace psstore::testing
