// A shard's answers to requests for data, of all its connections: pushes, plain writes, reads.
//
// Complete: whatever can be asked about data is answered here, be it over a socket, in shared memory, or
// from a device. One thing is policy's (protocol/shard_facts.py), which can verify signatures: a request
// that carries a decision that is new to this shard is handed out first, and handed in again once the
// decision is applied.
//
//   request ─► client may? ─► news? ─► policy ─► again
//                            │ no
//                            ├─► write ─► reply, and those who waited for it
//                            └─► read ──► reply │ it waits: PendingReads │ a device fills it in: filling_
//
// Replies to connections other than the one that is served are deliveries, and requests that fail are
// failures: whoever drives the connections takes both with wake().
//
// One thread at a time, as the connections of a shard are served.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "device/device_arena.h"
#include "server/connected_client.h"
#include "server/frame_calls.h"
#include "server/pending_reads.h"
#include "server/replication.h"
#include "server/replies.h"
#include "wire/carry.h"

namespace psstore {

// How long a reader holds decisions without reading: long enough for any pause of one that is there.
inline constexpr double kHoldS = 60.0;
// Readers of one shard that hold decisions at a time.
inline constexpr size_t kMaxHolds = 256;

struct DataServiceOptions {
  // Of values that one connection may read where they lie, at a time.
  uint64_t max_leased_bytes = uint64_t{1} << 30;
  // The frame that tells a client of a device's blocks, before it reads what lies there.
  std::function<std::string(const std::vector<std::shared_ptr<device::SharedBlock>>&)>
      describe_blocks = {};
};

class DataService {
 public:
  // A request that can't be served.
  struct Failure {
    uint64_t connection;
    uint64_t request;
    std::exception_ptr error;
  };

  // The shard lives as long as this.
  explicit DataService(Shard& shard, DataServiceOptions options = {})
      : shard_(shard), options_(std::move(options)) {}

  // ---- what policy says

  // From now on no request is taken.
  void close() { closed_ = true; }
  bool is_closed() const { return closed_; }
  // While it is frozen nothing is heard from clients, so that nothing changes.
  void freeze(bool frozen) { frozen_ = frozen; }
  bool is_frozen() const { return frozen_; }
  // The connection's handshake is over.
  void opened(const std::shared_ptr<ConnectedClient>& client) {
    clients_[client->connection] = client;
  }
  // That life of the rank attached here; 0 if none did.
  uint32_t newest_incarnation(uint32_t rank) const;
  // What the workers of a rank do here; of each that has attached.
  const std::shared_ptr<Traffic>& traffic_of(uint32_t rank);
  const std::map<uint32_t, std::shared_ptr<Traffic>>& traffic() const { return traffic_; }
  // Of all ranks.
  const std::unordered_map<uint32_t, uint32_t>& newest_incarnations() const {
    return incarnations_;
  }
  void attached(const Life& life);
  // Slices are gone, or have been defined.
  void schema_changed() { pending_.touched_all(); }
  // The shard has applied a decision, which waits for its scale or does not.
  void advanced(bool needs_scale);
  // There was no room for what this decision asks for. It is told only once: reads that wait for it try again.
  // `record`: the body of what standbys are sent of it.
  void could_not_apply(const Decision& decision, std::string record) {
    unapplied_ = {decision, std::move(record)};
  }
  // The last decision that every slice here can apply, as far as this shard knows.
  uint64_t applied() const { return shard_.version() - (lacks_scale_ ? 1 : 0); }

  // ---- a shard and its standbys

  // What this shard's standbys are sent.
  Replication& replication() { return replication_; }
  // Sends standbys something that policy knows of; `body`: a Record.
  void record(std::string_view body);
  // The same of what says only that this shard leads now.
  void record_beat(std::string_view body, double now_s);
  // Sends a new standby all slots as they are, and what waits in them. False: some wait for what a decision left open,
  // and nothing was sent.
  bool fill(uint64_t connection);
  // Frames by which a standby says what it has,
  static bool acknowledges(Op op);
  // and those that are repeated on a standby without policy.
  static bool replays(Op op);
  BufferRef memory_for(uint64_t payload_bytes) { return shard_.allocate(payload_bytes); }
  // This shard is a standby of the one at the other end of that connection.
  void leads(const std::shared_ptr<ConnectedClient>& leader) {
    leader_ = leader;
    shard_.goes_on_for_another();
  }
  // Does on a standby what its shard has done. Throws what the shard throws: then the two differ.
  void replay(const Frame& frame, Replies& replies);

  // ---- requests

  // Those with a payload.
  static bool is_write(Op op);
  // Whether it is a request for data.
  static bool takes(const Header& header);
  // Whether policy has to hear first of what the frame carries. Throws Error: the request fails, or, if the
  // code is a ProtocolError's, the connection.
  bool brings_news(const ConnectedClient& client, const Frame& frame) const;
  // Room for the payload that is announced; empty: it is not worth receiving. Throws Error.
  // REQUIRES: !brings_news().
  BufferRef admit(const ConnectedClient& client, Frame& frame);
  // Answers a complete frame: adds the reply, or has the read wait. Throws Error, std::bad_alloc.
  // REQUIRES: !brings_news().
  void answer(const std::shared_ptr<ConnectedClient>& client, const std::shared_ptr<Frame>& frame,
              Replies& replies, double now_s);
  void fail(uint64_t connection, uint64_t request, std::exception_ptr error) {
    failures_.push_back({connection, request, std::move(error)});
  }

  // The same of a complete frame that has failed as a whole. A write that is numbered uses its number all the same,
  // here and on standbys; one that came before is answered as it was first. Throws Error: the connection fails.
  void refuse(const ConnectedClient& client, Frame& frame, std::exception_ptr error, ErrorCode code,
              Replies& replies);

  // ---- connections

  // The connection is gone: nothing is read there, and nothing waits.
  void forget(uint64_t connection);
  // Connections that read a value in shared memory since then, or longer.
  std::vector<uint64_t> reading_since(double before_s) const;
  // Answers that are read in shared memory.
  size_t num_leases() const;

  // ---- what becomes due

  // Looks at the reads whose wait may be over, and at those that a device has filled in by now.
  void wake(double now_s);
  // When wake() may next give something.
  std::optional<double> next_wake() const;
  // Readers that hold decisions.
  size_t num_holds() const { return holds_.size(); }
  // A device is at work on replies.
  bool is_filling() const { return !filling_.empty(); }
  // Replies for connections other than the one that was served, in the order of their numbers.
  std::map<uint64_t, Replies> take_deliveries() {
    tell_released();
    return std::exchange(deliveries_, {});
  }
  std::vector<Failure> take_failures() { return std::exchange(failures_, {}); }
  bool has_failures() const { return !failures_.empty(); }

 private:
  struct Unapplied {
    Decision decision;
    std::string record;
  };

  // A read whose values a device writes.
  struct Filling {
    PendingRead read;
    ReadReply reply;
    bool whole;
  };

  // A reader that holds decisions.
  struct Hold {
    uint64_t connection;
    double until_s;  // if it does not read before
  };

  void answer_hold(const ConnectedClient& client, const Frame& frame, Replies& replies,
                   double now_s);
  // What changes are made of is kept as long as somebody who has asked for some is connected, and so long after.
  void forget_changes(double now_s);
  void release_holds(const std::function<bool(const Hold&)>& are_over);
  // The decision as of which the frame reads; none: the last. Throws Error(VERSION_GONE).
  std::optional<uint64_t> read_at(const Frame& frame, double now_s);
  void check_may_push(const ConnectedClient& client, const Header& header) const;
  void hear_scale(const ConnectedClient& client, const Carry& carry);
  void answer_write(const ConnectedClient& client, Frame& frame, Replies& replies);
  void record_write(const ConnectedClient& client, const Frame& frame, const SliceTable& outcome);
  // Where a payload lies that a standby may see; none: nowhere.
  std::optional<Lying> where(const ConnectedClient& client, const Piece& payload) const;
  void record_bases(const ConnectedClient& client, std::span<const Key> based);
  void record_scale(uint64_t number, std::optional<double> factor);
  void set_scale(uint64_t number, std::optional<double> factor);
  void fill_slots(uint64_t connection, std::span<const SlotCopy> copies);
  void fill_staged(uint64_t connection, std::span<const SlotCopy> copies);
  void take_fill(const Frame& frame);
  // What this standby has let go of, of the memory that it sees.
  void tell_released();
  // That the change was made here, too.
  static void acknowledge(const Frame& frame, Replies& replies);
  void wait(PendingRead read, const Wanted& wanted, double now_s);
  // `whole`: a delta that was read for it did not say its change.
  void answer_read(PendingRead read, double now_s, Replies& replies, bool whole = false);
  [[noreturn]] void throw_late(const PendingRead& read) const;
  // To deliveries_; or has them wait again, or fail.
  void answer_due(std::vector<PendingRead> due, double now_s);
  void answer_filled(double now_s);
  void free_left(double now_s);
  // Runs `answer` for a read that is not being served: what it adds is delivered, what it throws a failure.
  template <typename Answer>
  void deliver(uint64_t connection, uint64_t request, Answer answer);
  void send(const PendingRead& read, ReadReply& reply, double now_s, Replies& replies);
  void tell_blocks(ConnectedClient& client, Replies& replies);

  Shard& shard_;
  const DataServiceOptions options_;
  bool closed_ = false;
  bool frozen_ = false;
  std::optional<Unapplied> unapplied_;
  uint64_t scaled_ = 0;       // the last decision whose scale was told here
  bool lacks_scale_ = false;  // the last decision is to be scaled, and was not
  std::unordered_map<uint32_t, uint32_t> incarnations_;           // by rank
  std::map<uint32_t, std::shared_ptr<Traffic>> traffic_;          // by rank
  std::map<uint64_t, std::shared_ptr<ConnectedClient>> clients_;  // by connection
  PendingReads pending_;
  std::unordered_map<uint64_t, Hold> holds_;  // by the number that the reader has chosen
  std::set<uint64_t> followers_;              // connections that have asked for changes
  std::optional<double>
      changes_until_s_;          // without any, what changes are made of is kept until then
  std::deque<Filling> filling_;  // in the order in which the device writes them
  // Of lost connections whose clients may still write there, and when to look at them again.
  std::vector<std::shared_ptr<PushArena>> left_;
  double look_at_left_s_ = 0;
  std::map<uint64_t, Replies> deliveries_;  // by connection
  std::vector<Failure> failures_;
  Replication replication_;
  std::shared_ptr<ConnectedClient> leader_;  // null: this leads, or follows nobody yet
};

}  // namespace psstore
