// A shard with a standby, and whatever clients and policy may do there: once the standby has heard all, it has what the
// shard has, to the byte, and neither of them ever fails.
//
//   workers a, b ─┐ requests                  records
//   client c ─────┴──────────► shard ──────────────────────► standby
//   policy ──────────────────►   └─ of policy's events their numbers
#include <algorithm>
#include <array>
#include <functional>
#include <stdexcept>

#include "chosen_requests.h"
#include "fuzz_targets.h"
#include "server/server_protocol.h"
#include "shm/push_rooms.h"
#include "standby_facts.h"

namespace psstore::testing {
namespace {

constexpr size_t kMaxTensors = 24;

// What policy does at a shard, and at its standbys.
using Event = std::function<void(Shard&, DataService&)>;

Bytes taken(Replies& replies) {
  Bytes all;
  for (const Replies::Part& part : replies.take()) append(all, bytes_of(part));
  return all;
}

// A shard's end of a connection.
struct Connection {
  Connection(DataService& service, uint64_t its_number)
      : number(its_number), protocol(decoder, service, its_number) {}

  const uint64_t number;
  FrameDecoder decoder;
  ServerProtocol protocol;
};

// What a worker pushes through, as it has it mapped.
struct PushMemory {
  const std::shared_ptr<PushArena> arena = PushArena::create(8 * kPushBlockBytes);
  const Mapping mapping{arena->file().get(), arena->num_bytes(), Access::kWrite};
  PushRooms rooms{arena->control_file().get(), arena->num_bytes()};
};

struct Client {
  std::string name;
  std::optional<Origin> worker = {};  // what it pushes next
  std::optional<PushMemory> memory = {};
  std::optional<Connection> connection = {};
};

struct Standby {
  Standby(const ShardOptions& options, DataService& leader, uint64_t number)
      : shard(options), at_leader(leader, number) {}

  Shard shard;
  DataService service{shard};
  Connection to_leader{service, 1};
  Connection at_leader;  // its other end
};

class ReplicatedShard {
 public:
  explicit ReplicatedShard(std::span<const std::byte> program) : choose_(program) {
    for (int i = 0; i < 8; ++i) if_there_is_memory([this] { define(); });
    for (Client& client : clients_) connect(client);
  }

  void run() {
    if_there_is_memory([this] { follow(); });
    while (choose_.any_left()) {
      if_there_is_memory([this] { go_on(); });
      replicate();
    }
    if_there_is_memory([this] { compare(); });
  }

 private:
  static void require(bool holds, const std::string& what) {
    if (!holds) throw std::logic_error(what);
  }

  // Who needs a step that there is none for asks again.
  template <typename Do>
  static void if_there_is_memory(Do it) try {
    it();
  } catch (const Error& error) {
    require(error.code() == ErrorCode::OUT_OF_MEMORY, error.what());
  }

  ShardOptions chosen_options() {
    ShardOptions options;
    options.num_stripes = 4;
    options.refuse_non_finite = choose_.one_in(2);
    if (choose_.one_in(4)) options.max_memory_bytes = 900'000;
    if (choose_.one_in(4)) options.max_kept_bytes = 3'000;
    if (choose_.one_in(4)) options.arena = std::make_shared<ValueArena>(16U << 20);
    return options;
  }

  void go_on() {
    Client& client = clients_[choose_.one_of({0U, 1U, 0U, 1U, 2U})];
    switch (choose_.below(24)) {
      case 1:
      case 2:
      case 3: return decide();
      case 4: return define();
      case 5: return drop();
      case 6: return reconnect(client);
      case 7: return seal();
      case 8: return pass_time();
      case 9: return follow();
      case 10: return compare();
      default: return ask(client);
    }
  }

  // ---- policy

  // The body of a record of it.
  std::string note(Event event) {
    const uint64_t number = events_.size();
    events_.push_back(std::move(event));
    return {reinterpret_cast<const char*>(&number), sizeof number};
  }
  void happen(const Event& event) {
    event(shard_, service_);
    service_.record(note(event));
  }

  void define() {
    const TensorDefinition tensor = chosen_tensor(choose_, ++last_tensor_);
    if (tensors_.size() == kMaxTensors) return;
    happen([tensor](Shard& shard, DataService& service) {
      shard.define(tensor);
      service.schema_changed();
    });
    tensors_.push_back(tensor);
  }

  void drop() {
    if (tensors_.size() <= 1 || !choose_.one_in(4)) return;
    const size_t place = choose_.below(tensors_.size());
    happen([id = tensors_[place].tensor_id](Shard& shard, DataService& service) {
      shard.drop(id);
      service.schema_changed();
    });
    tensors_.erase(tensors_.begin() + static_cast<ptrdiff_t>(place));
  }

  void seal() {
    const Origin origin = *clients_[choose_.below(2)].worker;
    happen([origin](Shard& shard, DataService&) { shard.seal(origin); });
  }

  // What there was no memory for comes again.
  void decide() {
    const uint64_t version = shard_.version();
    if (!decisions_.contains(version + 1)) {
      const std::array next{*clients_[0].worker, *clients_[1].worker};
      decisions_.emplace(version + 1, chosen_decision(choose_, version + 1, next));
    }
    const Decision decision = decisions_.at(version + 1);
    const Event event = [decision](Shard& shard, DataService& service) {
      shard.advance(decision);
      service.advanced(decision.needs_scale());
    };
    try {
      happen(event);
      for (const Member& one : decision.members()) {
        clients_[one.origin.rank].worker->round = one.origin.round + 1;
      }
    } catch (const Error& error) {
      require(shard_.version() == version && !ends_connection(error.code()), error.what());
      if (error.code() == ErrorCode::OUT_OF_MEMORY) {
        service_.could_not_apply(decision, note(event));
      } else {
        decisions_.erase(version + 1);
      }
    }
  }

  void pass_time() {
    now_s_ += choose_.one_of({1, 100});
    service_.wake(now_s_);
    if (choose_.one_in(2)) shard_.settle(1);
  }

  // ---- clients

  void connect(Client& client) {
    client.connection.emplace(service_, ++last_connection_);
    ServerProtocol& protocol = client.connection->protocol;
    protocol.open(client.name, /*wants_checksum=*/choose_.one_in(3));
    if (!client.worker) return;
    protocol.attach(client.worker->life());
    client.memory.emplace();
    client.memory->arena->seal();
    protocol.client().arenas.push_back(client.memory->arena);
    if (choose_.one_in(2)) show(client);
  }

  // A worker as another life, maybe.
  void reconnect(Client& client) {
    service_.forget(client.connection->number);
    if (client.worker && choose_.one_in(2)) ++client.worker->incarnation;
    connect(client);
  }

  // The standby sees what the client pushes through.
  void show(const Client& client) {
    if (!standby_ || !client.memory) return;
    const uint64_t number = client.connection->number, address = number << 36;
    standby_->to_leader.protocol.client().seen.push_back(
        SeenMemory::map(client.memory->arena->file().get(), address));
    service_.replication().sees(standby_->at_leader.number, number, address);
  }

  void ask(Client& client) {
    ChosenRequest request = chosen_request(choose_, tensors_, shard_.version());
    const Op op = request.op;
    const Origin next = client.worker.value_or(Origin{});
    FrameParts parts{.op = op, .rank = next.rank, .incarnation = next.incarnation};
    parts.request = op == Op::kRELEASE ? choose_.below(last_request_ + 1) : ++last_request_;
    parts.round = op == Op::kPUSH
                      ? next.round + choose_.one_of<uint64_t>({0, 0, 1}) - choose_.below(2)
                      : shard_.version() - choose_.below(2);
    parts.sequence = is_numbered(op) ? next_sequence(client) : choose_.below(3);
    const bool is_write = DataService::is_write(op);
    parts.shared = is_write ? choose_.one_in(2) && lay(client, request) : choose_.one_in(2);
    parts.table = request.table;
    parts.body = std::as_bytes(std::span(request.body));
    parts.payload_bytes = request.payload.size();
    Bytes bytes(parts.encoded_bytes());
    encode_frame(parts, bytes.data());
    if (!parts.shared) append(bytes, request.payload);
    try {
      hear(client, bytes);
    } catch (const Error& error) {
      require(error.code() != ErrorCode::INTERNAL, error.what());
      reconnect(client);
    }
  }

  // Or the last, which comes again.
  uint64_t next_sequence(const Client& client) {
    return shard_.last_sequence(client.name) + (choose_.one_in(8) ? 0 : 1);
  }

  // Into the client's memory. False: there is no room.
  bool lay(Client& client, ChosenRequest& request) {
    const auto is_barred = [](const SliceEntry& entry) { return entry.dtype == DType::kTopK; };
    if (!client.memory || request.payload.empty() ||
        std::ranges::any_of(request.table, is_barred)) {
      return false;
    }
    auto& [arena, mapping, rooms] = *client.memory;
    const std::optional<size_t> block = rooms.take(request.payload.size());
    if (!block) return false;
    const size_t offset = *block * kPushBlockBytes;
    std::memcpy(mapping.data() + offset, request.payload.data(), request.payload.size());
    rooms.sent(*block, last_request_);
    request.table = laid_out(request.table, offset);
    return true;
  }

  // Has the shard hear that. What the client is answered it reads at once.
  void hear(Client& client, std::span<const std::byte> bytes) {
    Connection& from = *client.connection;
    const size_t max_read = choose_.one_in(4) ? 1 + choose_.byte() : bytes.size();
    receive(from.decoder, bytes, max_read, [&] {
      for (bool was_shut = true; was_shut;) {
        while (const auto frame = from.protocol.next_frame(now_s_)) hand_out(from, frame);
        was_shut = from.protocol.is_shut();
        replicate();
        from.protocol.replies().take();
      }
    });
    service_.take_deliveries();
    service_.take_failures();
  }

  // To policy: the decisions that it carries come first.
  void hand_out(Connection& from, const std::shared_ptr<Frame>& frame) {
    const auto brings_news = [&] { return service_.brings_news(from.protocol.client(), *frame); };
    for (int tries = 0; tries < 3 && brings_news(); ++tries) decide();
    if (DataService::takes(frame->header) && !brings_news()) {
      from.protocol.again(frame);
    } else if (!frame->complete) {
      from.decoder.discard();
    }
  }

  // ---- the standby

  // A new one, unless slots wait for what a decision left open.
  void follow() {
    if (standby_) lose_standby();
    if (!shard_.is_settled()) return;
    ShardOptions options = options_;
    options.arena = nullptr;
    options.max_memory_bytes = options.max_kept_bytes = kNoMemoryLimit;
    auto& [copy, service, to_leader, at_leader] =
        standby_.emplace(options, service_, ++last_connection_);
    to_leader.protocol.lead();
    copy.set_version(shard_.version());
    const auto last = decisions_.find(shard_.version());
    copy.resume(shard_.history(),
                last == decisions_.end() ? std::nullopt : std::optional(last->second));
    for (auto& [writer, refusals] : shard_.refusals()) copy.resume_refusals(writer, refusals);
    for (const TensorDefinition& tensor : tensors_) copy.define(tensor);
    at_leader.protocol.open("standby", /*wants_checksum=*/choose_.one_in(2));
    at_leader.protocol.follow();
    try {
      require(service_.fill(at_leader.number), "a shard that is settled fills a standby");
    } catch (const Error&) {
      lose_standby();
      throw;
    }
    service_.replication().count(at_leader.number);
    for (const Client& client : clients_) show(client);
  }

  void lose_standby() {
    service_.forget(standby_->at_leader.number);
    service_.replication().forget(standby_->at_leader.number);
    standby_.reset();
  }

  // Until neither has anything to tell the other.
  void replicate() {
    while (standby_) {
      Connection& from = standby_->at_leader;
      const Bytes records = taken(from.protocol.replies());
      repeat(records);
      Bytes answers = taken(standby_->to_leader.protocol.replies());
      for (auto& [_, more] : standby_->service.take_deliveries()) append(answers, taken(more));
      if (records.empty() && answers.empty()) return;
      receive(from.decoder, answers, answers.size(), [&] {
        require(!from.protocol.next_frame(now_s_), "a standby's word is for nobody else");
      });
    }
  }

  void repeat(std::span<const std::byte> records) try {
    Connection& from = standby_->to_leader;
    receive(from.decoder, records, records.size(), [&] {
      while (const auto frame = from.protocol.next_frame(now_s_)) {
        require(frame->header.op == Op::kRECORD, "what is not policy's is repeated without it");
        uint64_t event = 0;
        std::memcpy(&event, frame->body.data(), sizeof event);
        events_.at(event)(standby_->shard, standby_->service);
        from.protocol.replies().add(
            head_of({.op = Op::kRECORDED, .request = frame->header.request}));
      }
    });
  } catch (const Error& error) {
    throw std::logic_error(std::string("the standby gives up: ") + error.what());
  }

  void compare() {
    if (!standby_) return;
    replicate();
    const auto facts = [this](Shard& shard) { return facts_of(shard, tensors_, {"a", "b", "c"}); };
    const Facts here = facts(shard_), there = facts(standby_->shard);
    const auto [one, other] = std::ranges::mismatch(here, there);
    if (one == here.end() && other == there.end()) return;
    require(false, "the standby differs: " + (one != here.end() ? one : other)->first);
  }

  Choices choose_;
  const ShardOptions options_ = chosen_options();
  Shard shard_{options_};
  DataService service_{shard_};
  double now_s_ = 100;
  std::vector<TensorDefinition> tensors_;
  std::map<uint64_t, Decision> decisions_;  // by number
  std::vector<Event> events_;               // by the number that records say
  std::array<Client, 3> clients_{{{"a", Origin{0, 1, 1}}, {"b", Origin{1, 1, 1}}, {"c"}}};
  std::optional<Standby> standby_;
  uint64_t last_tensor_ = 0;
  uint64_t last_connection_ = 0;
  uint64_t last_request_ = 0;
};

}  // namespace

void fuzz_replication(std::span<const std::byte> program) {
  ReplicatedShard(program).run();
}

}  // namespace psstore::testing
