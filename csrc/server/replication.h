// What a shard's standbys are sent, in the order in which it changed the shard, and what they have of it.
//
//   change ─► record n ─► every follower         A record is a frame; its request is the record's number.
//   reply made after n ─► gate ─► client         A follower answers it when it has made the change, too,
//                          ▲                     and a reply waits until all followers that count have
//   follower: "n is here" ─┘                     what the shard had when the reply was made.
//
// So nobody is told what would be lost with this process. A follower counts once it has all that the shard is; who
// counts and has gone still does, until somebody who knows says that it will never lead: forget().
//
// Until a follower counts, records wait for it behind what fills it, in the memory of the shard. Where they come faster
// than it takes them, replies wait for it, too, once there is as much of them as of what fills it.
//
// Where a follower may come to lead without a word from here, because other shards have voted so, a leader's word has an
// end: the lease. A beat is a record, and its time is noted; who has answered it will not lead before the lease is over
// that began then. Later nobody is told anything, be it as old as it may: somebody else may know better by now. A lease goes
// on while the machine is suspended.
//
// Large payloads are not sent to a follower of this host that sees the memory in which they lie (shm/seen_memory.h): that
// of clients that push through it, or the shard's own. A record says where, the follower stages it there, and says when
// it has let go of it. Until then it is lent, and stays as it is: also where a client's connection is gone, of which it may
// not know, and where that of the follower is, which may come to lead.
//
// One thread at a time, as the connections of a shard are served.
#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "core/clock.h"
#include "table/gather.h"
#include "wire/encoder.h"

namespace psstore {

class Replies;

// Of records that may wait behind what fills a follower, however little that is.
inline constexpr uint64_t kMinBehindBytes = 64u << 20;

// Whose memory a record's payload lies in, and where it begins there.
struct Lying {
  uint64_t owner;  // a client's connection, or kOwnMemory
  uint64_t offset;
};
// No client's: where the shard keeps what it receives.
inline constexpr uint64_t kOwnMemory = 0;

class Replication {
 public:
  // `suspended_s`: for how long the clock of all connections has stood still until now.
  explicit Replication(double (*suspended_s)() = psstore::suspended_s)
      : suspended_s_(suspended_s) {}

  struct Follower {
    Replies* out = nullptr;  // null: its connection is gone, and it may lead already, if it counts
    bool wants_checksum = false;
    bool counts = false;
    uint64_t has = 0;            // the last record that it has acknowledged
    double answered_s = 0;       // when the newest beat was made that it has acknowledged
    uint64_t filling_bytes = 0;  // of what it is filled with,
    uint64_t behind_bytes = 0;   // and of the records behind that
    std::map<uint64_t, uint64_t> sees = {};   // where memory begins for it, by owner
    std::map<uint64_t, BufferRef> lent = {};  // by record
  };

  // ---- followers, by their connections

  // From now on it is sent every record. `out` lives until disconnected().
  void follow(uint64_t connection, Replies& out, bool wants_checksum);
  // From now on nobody is told what it does not have. REQUIRES: it follows.
  void count(uint64_t connection);
  // Its connection is gone, if it is one of them. If it counts, nobody is told anything until forget().
  void disconnected(uint64_t connection);
  // It will never lead, or does not follow any more.
  void forget(uint64_t connection);
  void acknowledged(uint64_t connection, uint64_t number);
  const std::map<uint64_t, Follower>& followers() const { return followers_; }

  // ---- records

  bool is_followed() const { return !followers_.empty(); }
  // Whether some follower is sent records, and replies don't wait for it yet.
  bool is_filling() const;
  // Sends a change to all. `parts` without a request; its payload is `payload`, none if that is empty, and may be
  // `lying` in memory that followers see.
  void record(FrameParts parts, const Piece& payload = {},
              const std::optional<Lying>& lying = std::nullopt);
  // Sends one follower a part of what the shard was when it began to follow.
  void record_to(uint64_t connection, FrameParts parts, const std::vector<Piece>& payload = {});

  // ---- memory that followers see

  // The follower has mapped that of the owner, from that address on. REQUIRES: it follows.
  void sees(uint64_t connection, uint64_t owner, uint64_t address);
  // The client's connection is gone.
  void client_gone(uint64_t client);
  // The follower has let go of what lies where that record says.
  void let_go(uint64_t connection, uint64_t number);

  // ---- the lease

  // Followers that count don't lead for so long after a beat that they have acknowledged; they may at any time later.
  void set_lease(double seconds) { lease_s_ = seconds; }
  // On the clock of all connections. What is asked from now on is told as of now, or not at all.
  void is_now(double now_s);
  // The last record was made now, and is a beat.
  void is_beat() { beats_.push_back({last_, now_s_}); }

  // ---- the gate

  // Number of the last record.
  uint64_t last() const { return last_; }
  // Replies that were made at that record, or before, may go.
  uint64_t released() const { return released_; }
  bool is_open() const { return last_ <= released_; }
  // Replies of that connection wait.
  void waits(uint64_t connection) { waiting_.insert(connection); }
  // Connections that have more to send than they had by themselves: followers, and those that waited and may go on.
  std::set<uint64_t> take_ready();

 private:
  static constexpr uint64_t kAll = std::numeric_limits<uint64_t>::max();
  static constexpr double kForever = std::numeric_limits<double>::infinity();

  struct Beat {
    uint64_t record;
    double made_s;
  };

  // Whether the follower sees where the payload lies: then it is sent the rest, and lent that.
  bool lend(uint64_t connection, Follower& follower, FrameParts parts, const Piece& payload,
            const Lying& lying);
  // Returns how many bytes they are.
  uint64_t send(uint64_t connection, const Follower& follower, FrameParts parts,
                const std::vector<Piece>& payload);
  // The last record up to which replies may go, as far as that follower is concerned.
  uint64_t released_by(const Follower& follower) const;
  void release();

  double (*const suspended_s_)();
  std::map<uint64_t, Follower> followers_;
  uint64_t last_ = 0;
  uint64_t released_ = kAll;
  double now_s_ = 0;  // with what the clock has stood still
  double lease_s_ = kForever;
  double lease_ends_s_ = kForever;  // of the follower whose lease ends first
  std::deque<Beat> beats_;          // that some follower has not acknowledged
  std::set<uint64_t> waiting_;
  std::set<uint64_t> ready_;
};

}  // namespace psstore
