#include "server/data_service.h"

#include <algorithm>
#include <new>
#include <span>
#include <sstream>
#include <utility>

#include "core/breakable_rules.h"
#include "core/crc32c.h"
#include "table/device_backend.h"
#include "table/published.h"
#include "wire/encoder.h"
#include "wire/rows_asked.h"

namespace psstore {
namespace {

// How often a shard looks whether a client that is gone has let go of its memory.
constexpr double kLookS = 0.1;

uint32_t checksum_of(std::span<const Piece> pieces) {
  uint32_t crc = 0;
  for (const Piece& piece : pieces) crc = crc32c({piece.buffer->data(), piece.num_bytes}, crc);
  return crc;
}

// What a read waits for, slice by slice.
bool may_come(ErrorCode status) {
  return status == ErrorCode::NOT_INITIALISED ||
         (status == ErrorCode::NOT_APPLIED && holds(BreakableRule::kCONTRIBUTIONS_ARE_WAITED_FOR));
}

Op reply_to(Op op) {
  return static_cast<Op>(static_cast<uint8_t>(op) + 1);
}

bool is_read(Op op) {
  return op == Op::kPULL || op == Op::kNORM || op == Op::kPULL_ROWS || op == Op::kLIST_ROWS;
}

bool is_hold(Op op) {
  return op == Op::kHOLD || op == Op::kFREE;
}

bool carries(Op op) {
  return op == Op::kPUSH || is_read(op);
}

// Whether the changes that were read are what the bytes say, now that they are there.
bool says_changes(ReadReply& reply) {
  return std::ranges::all_of(reply.values.pieces, [&](const Piece& piece) {
    return say_changes(reply.table.entries(), {piece.buffer->data(), piece.num_bytes});
  });
}

void add_head(const Frame& frame, FrameParts parts, Replies& replies) {
  parts.op = reply_to(frame.header.op);
  parts.request = frame.header.request;
  replies.add(head_of(parts));
}

}  // namespace

void DataService::acknowledge(const Frame& frame, Replies& replies) {
  add_head(frame, {}, replies);
}

// ---- what policy says -------------------------------------------------------------------------------

uint32_t DataService::newest_incarnation(uint32_t rank) const {
  const auto known = incarnations_.find(rank);
  return known == incarnations_.end() ? 0 : known->second;
}

void DataService::attached(const Life& life) {
  incarnations_[life.rank] = std::max(life.incarnation, newest_incarnation(life.rank));
}

const std::shared_ptr<Traffic>& DataService::traffic_of(uint32_t rank) {
  std::shared_ptr<Traffic>& traffic = traffic_[rank];
  if (traffic == nullptr) traffic = std::make_shared<Traffic>();
  return traffic;
}

void DataService::advanced(bool needs_scale) {
  unapplied_.reset();
  lacks_scale_ = needs_scale;
  pending_.reached(shard_.version());
}

// ---- requests ---------------------------------------------------------------------------------------

bool DataService::is_write(Op op) {
  switch (op) {
    case Op::kPUSH:
    case Op::kASSIGN:
    case Op::kADD:
    case Op::kINIT:
    case Op::kRESTORE: return true;
    default: return false;
  }
}

bool DataService::takes(const Header& header) {
  const bool has_payload = header.payload_bytes != 0;
  return is_write(header.op) || ((is_read(header.op) || is_hold(header.op)) && !has_payload);
}

void DataService::check_may_push(const ConnectedClient& client, const Header& header) const {
  const std::string rank = std::to_string(header.rank);
  if (client.worker != Life{header.rank, header.incarnation}) {
    throw Error(ErrorCode::NOT_A_WORKER,
                "PUSH as rank " + rank + " needs ATTACH with its ticket on this connection first");
  }
  const uint32_t newest = newest_incarnation(header.rank);
  if (header.incarnation < newest) {
    throw Error(ErrorCode::STALE_INCARNATION,
                "rank " + rank + " lives on as incarnation " + std::to_string(newest) +
                    "; this client is incarnation " + std::to_string(header.incarnation) +
                    " and was replaced");
  }
}

bool DataService::brings_news(const ConnectedClient& client, const Frame& frame) const {
  const Op op = frame.header.op;
  if (op == Op::kPUSH) check_may_push(client, frame.header);
  if (!carries(op) || parse_carry(carry_of(frame)).newest <= shard_.version()) return false;
  return op != Op::kPUSH || holds(BreakableRule::kDECISIONS_COME_FIRST);
}

void DataService::hear_scale(const ConnectedClient& client, const Carry& carry) {
  // Who is no worker has no say in it: nothing else vouches for a scale.
  const bool is_new = scaled_ < carry.scaled && carry.scaled == shard_.version();
  if (!is_new || !client.worker || !holds(BreakableRule::kSCALES_ARE_HEARD)) return;
  std::optional<double> factor = carry.factor;
  if (!factor && !holds(BreakableRule::kNO_NORM_IS_A_SKIP)) factor = 1.0;
  set_scale(carry.scaled, factor);
  record_scale(carry.scaled, factor);
}

void DataService::set_scale(uint64_t number, std::optional<double> factor) {
  shard_.set_scale(number, factor);
  scaled_ = number;
  lacks_scale_ = false;
  pending_.touched_all();
}

BufferRef DataService::admit(const ConnectedClient& client, Frame& frame) {
  if (frame.header.op == Op::kPUSH) hear_scale(client, parse_carry(carry_of(frame)));
  return psstore::admit(shard_, frame);
}

void DataService::answer(const std::shared_ptr<ConnectedClient>& client,
                         const std::shared_ptr<Frame>& frame, Replies& replies, double now_s) {
  if (is_read(frame->header.op)) {
    const Carry carry = parse_carry(carry_of(*frame));
    hear_scale(*client, carry);
    answer_read({client, frame, carry.at_least, carry.wait_s, now_s + carry.wait_s}, now_s,
                replies);
  } else if (is_hold(frame->header.op)) {
    answer_hold(*client, *frame, replies, now_s);
  } else {
    answer_write(*client, *frame, replies);
  }
  answer_due(pending_.take_due(), now_s);
  if (auto own = deliveries_.extract(client->connection)) replies.add(own.mapped().take());
}

void DataService::answer_write(const ConnectedClient& client, Frame& frame, Replies& replies) {
  const Header& header = frame.header;
  if (header.payload_bytes == 0 || header.is_shared()) admit(client, frame);
  const SliceTable table = write(shard_, frame, client.writer);
  if (client.traffic != nullptr) client.traffic->pushed_bytes += header.payload_bytes;
  if (replication_.is_followed()) record_write(client, frame, table);
  pending_.touched(frame.table.entries());
  add_head(frame, {.sequence = shard_.version(), .table = table.entries()}, replies);
}

void DataService::refuse(const ConnectedClient& client, Frame& frame, std::exception_ptr error,
                         ErrorCode code, Replies& replies) {
  const Header& header = frame.header;
  if (is_numbered(header.op)) {
    frame.payload = {};
    std::vector<SliceEntry> entries = entries_of(frame);
    try {
      const bool is_new = shard_.refuse_write(client.writer, header.sequence, entries, code);
      const SliceTable table(std::move(entries));
      if (!is_new) {
        add_head(frame, {.sequence = shard_.version(), .table = table.entries()}, replies);
        return;
      }
      if (replication_.is_followed()) record_write(client, frame, table);
    } catch (const Error& failed) {
      if (ends_connection(failed.code())) throw;
      error = std::current_exception();
    }
  }
  fail(client.connection, header.request, std::move(error));
}

void DataService::answer_hold(const ConnectedClient& client, const Frame& frame, Replies& replies,
                              double now_s) {
  const uint64_t reader = frame.header.sequence;
  uint64_t version = shard_.version();
  if (frame.header.op == Op::kHOLD) {
    if (reader == 0) throw Error(ErrorCode::BAD_ARGUMENT, "HOLD needs a sequence, which is 0");
    if (holds_.size() >= kMaxHolds && !holds_.contains(reader)) {
      throw Error(ErrorCode::OVERLOADED,
                  std::to_string(kMaxHolds) + " readers hold decisions of this shard; try later");
    }
    const auto [hold, is_new] = holds_.try_emplace(reader);
    if (is_new) version = shard_.hold(reader, frame.header.round != 0);
    hold->second = {client.connection, now_s + kHoldS};
  } else if (holds_.erase(reader) > 0) {
    shard_.release_hold(reader);
  }
  add_head(frame, {.sequence = version}, replies);
}

void DataService::release_holds(const std::function<bool(const Hold&)>& are_over) {
  std::erase_if(holds_, [&](const auto& entry) {
    const auto& [reader, hold] = entry;
    if (!are_over(hold)) return false;
    shard_.release_hold(reader);
    return true;
  });
}

std::optional<uint64_t> DataService::read_at(const Frame& frame, double now_s) {
  const uint64_t reader = frame.header.sequence;
  if (frame.header.op == Op::kNORM || reader == 0) return std::nullopt;
  const uint64_t at = frame.header.round;
  const auto found = holds_.find(reader);
  if (found == holds_.end() || !shard_.settle_hold(reader, at)) {
    throw Error(ErrorCode::VERSION_GONE,
                "version " + std::to_string(at) + " is not kept on shard " +
                    std::to_string(shard_.index()) + ", which is at " +
                    std::to_string(shard_.version()) +
                    "; it was held for too long, took too much memory, or the connection was lost");
  }
  found->second.until_s = now_s + kHoldS;
  return at;
}

void DataService::answer_read(PendingRead read, double now_s, Replies& replies, bool whole) {
  const Frame& frame = *read.frame;
  const bool patient = read.until_s > now_s;
  if (shard_.version() < read.at_least && unapplied_) {
    const Unapplied unapplied = *unapplied_;
    shard_.advance(unapplied.decision);
    record(unapplied.record);
    advanced(unapplied.decision.needs_scale());
  }
  if (shard_.version() < read.at_least) {
    if (!patient) throw_late(read);
    const AtVersion wanted{read.at_least};
    wait(std::move(read), wanted, now_s);
    return;
  }
  ConnectedClient& client = *read.client;
  const bool share = frame.header.is_shared() && !client.arenas.empty() &&
                     client.leases.has_room(options_.max_leased_bytes);
  const std::optional<uint64_t> at = read_at(frame, now_s);
  // Before the read, which may fail after it has the shard keep something.
  const auto asks_for_changes = [](const SliceEntry& entry) { return is_of_changes(entry.dtype); };
  if (std::ranges::any_of(frame.table, asks_for_changes)) {
    followers_.insert(client.connection);
    changes_until_s_ = now_s + kHoldS;
  }
  ReadReply reply = psstore::read(
      shard_, frame, {.share = share, .whole = whole, .at = at, .worker = client.worker});
  if (!reply.values.based.empty()) record_bases(client, reply.values.based);
  const auto fails = [](const SliceEntry& entry) { return is_failure(entry.status); };
  const auto failed = std::ranges::find_if(reply.table, fails);
  if (failed != reply.table.end() && patient && may_come(failed->status)) {
    wait(std::move(read), AtKey{failed->key}, now_s);
  } else if (reply.values.ready == nullptr || (reply.values.shared && client.is_own)) {
    send(read, reply, now_s, replies);
  } else {
    filling_.push_back({std::move(read), std::move(reply), whole});
  }
}

void DataService::wait(PendingRead read, const Wanted& wanted, double now_s) {
  read.waiting.begin(read.client->traffic, Activity::kWait, now_s);
  pending_.add(std::move(read), wanted);
}

void DataService::send(const PendingRead& read, ReadReply& reply, double now_s, Replies& replies) {
  ConnectedClient& client = *read.client;
  std::vector<Piece>& pieces = reply.values.pieces;
  const bool shared = reply.values.shared;
  if (shared) tell_blocks(client, replies);
  std::optional<uint32_t> crc;
  if (client.wants_checksum && !shared) crc = checksum_of(pieces);
  if (client.traffic != nullptr) client.traffic->pulled_bytes += reply.table.payload_bytes();
  add_head(*read.frame,
           {.shared = shared,
            .round = reply.values.restored ? 1U : 0U,
            .sequence = reply.values.version,
            .table = reply.table.entries(),
            .payload_bytes = reply.table.payload_bytes(),
            .payload_crc = crc},
           replies);
  if (shared) {
    replies.add_leased(reply.table.payload_bytes());
    client.leases.begin(read.frame->header.request, std::move(pieces), now_s);
  } else {
    for (Piece& piece : pieces) replies.add(std::move(piece));
  }
}

void DataService::tell_blocks(ConnectedClient& client, Replies& replies) {
  const auto* const backend = dynamic_cast<const DeviceBackend*>(shard_.backend().get());
  if (backend == nullptr || client.is_own) return;
  const auto blocks = backend->blocks_after(client.last_block);
  if (blocks.empty()) return;
  client.last_block = blocks.back()->number();
  replies.add(options_.describe_blocks(blocks));
}

void DataService::throw_late(const PendingRead& read) const {
  std::ostringstream message;
  message << "shard " << shard_.index() << " is at version " << shard_.version() << "; version "
          << read.at_least << " did not come within " << read.wait_s << " s";
  throw Error(ErrorCode::DEADLINE_EXCEEDED, message.str());
}

// ---- connections ------------------------------------------------------------------------------------

void DataService::forget(uint64_t connection) {
  replication_.disconnected(connection);
  replication_.client_gone(connection);
  if (leader_ != nullptr && leader_->connection == connection) leader_.reset();
  const auto found = clients_.find(connection);
  if (found == clients_.end()) return;
  ConnectedClient& client = *found->second;
  client.leases.clear();
  // A copy that its client has queued may be late. One of this process has the device wait for it.
  for (const auto& arena : client.arenas) {
    if (!client.is_own && !arena->is_let_go()) left_.push_back(arena);
  }
  look_at_left_s_ = 0;
  clients_.erase(found);
  release_holds([=](const Hold& hold) { return hold.connection == connection; });
  followers_.erase(connection);
  pending_.forget(connection);
  deliveries_.erase(connection);
  // What the device still writes to stays the shard's until it is done.
  std::erase_if(filling_,
                [=](const Filling& one) { return one.read.client->connection == connection; });
  std::erase_if(failures_, [=](const Failure& one) { return one.connection == connection; });
}

std::vector<uint64_t> DataService::reading_since(double before_s) const {
  std::vector<uint64_t> found;
  for (const auto& [connection, client] : clients_) {
    if (client->leases.any_since(before_s)) found.push_back(connection);
  }
  return found;
}

size_t DataService::num_leases() const {
  size_t count = 0;
  for (const auto& [_, client] : clients_) count += client->leases.size();
  return count;
}

// ---- what becomes due -------------------------------------------------------------------------------

void DataService::wake(double now_s) {
  replication_.is_now(now_s);
  release_holds([=](const Hold& hold) { return hold.until_s <= now_s; });
  forget_changes(now_s);
  if (now_s >= look_at_left_s_) free_left(now_s);
  answer_due(pending_.take_due(now_s), now_s);
  answer_filled(now_s);
}

void DataService::forget_changes(double now_s) {
  if (!changes_until_s_ || now_s < *changes_until_s_) return;
  changes_until_s_.reset();
  if (followers_.empty()) {
    shard_.forget_changes();
  } else {
    changes_until_s_ = now_s + kHoldS;
  }
}

void DataService::free_left(double now_s) {
  std::erase_if(left_, [](const auto& arena) { return arena->is_let_go(); });
  look_at_left_s_ = now_s + kLookS;
}

std::optional<double> DataService::next_wake() const {
  if (!deliveries_.empty() || !failures_.empty() || !filling_.empty()) return 0.0;
  std::optional<double> next = pending_.next_wake();
  if (changes_until_s_) next = std::min(next.value_or(*changes_until_s_), *changes_until_s_);
  if (!left_.empty()) next = std::min(next.value_or(look_at_left_s_), look_at_left_s_);
  for (const auto& [_, hold] : holds_) next = std::min(next.value_or(hold.until_s), hold.until_s);
  return next;
}

template <typename Answer>
void DataService::deliver(uint64_t connection, uint64_t request, Answer answer) {
  try {
    Replies& replies = deliveries_[connection];
    answer(replies);
    if (replies.empty()) deliveries_.erase(connection);
  } catch (const Error&) {
    fail(connection, request, std::current_exception());
  } catch (const std::bad_alloc&) {
    fail(connection, request, std::current_exception());
  }
}

void DataService::answer_due(std::vector<PendingRead> due, double now_s) {
  for (PendingRead& read : due) {
    if (read.waiting.runs()) read.waiting.end(now_s);
    const uint64_t request = read.frame->header.request;
    deliver(read.client->connection, request,
            [&](Replies& replies) { answer_read(std::move(read), now_s, replies); });
  }
}

void DataService::answer_filled(double now_s) {
  bool any = false;
  while (!filling_.empty()) {
    std::exception_ptr failed;
    try {
      if (!filling_.front().reply.values.ready->done()) break;
    } catch (const Error&) {
      failed = std::current_exception();
    }
    Filling filled = std::move(filling_.front());
    filling_.pop_front();
    any = true;
    const uint64_t request = filled.read.frame->header.request;
    deliver(filled.read.client->connection, request, [&](Replies& replies) {
      if (failed) std::rethrow_exception(failed);
      if (filled.reply.values.shared || filled.whole || says_changes(filled.reply)) {
        send(filled.read, filled.reply, now_s, replies);
      } else {
        answer_read(std::move(filled.read), now_s, replies, /*whole=*/true);
      }
    });
  }
  // Whoever gets a leased value may count on it that the memory of its pushes is free again.
  if (any) shard_.flush();
}

}  // namespace psstore
