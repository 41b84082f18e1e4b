// Where a shard answers the ordinary requests for data of all its connections, without anybody's judgement.
//
// A request is ordinary if nothing is to be decided about it: a push by the worker that its connection
// is attached as, a plain write, a pull; carrying nothing that the shard has not heard. Policy is whose
// that is (protocol/slices.py): it tells the desk what it has to know when that changes, and gets every
// other request as it came. Nothing is done here that policy would do otherwise, only sooner.
//
// Reads whose values are not there yet wait here, policy's own as well. What a write brings to those of
// other connections is to be delivered by whoever drives them; reads of which the desk can't say how they
// end are left to policy.
//
// One thread at a time, as the connections of a shard are served.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "serve/frame_calls.h"
#include "serve/parking.h"
#include "serve/replies.h"

namespace psstore {

// One life of a worker.
struct Life {
  uint32_t rank = 0;
  uint32_t incarnation = 0;

  bool operator==(const Life&) const = default;
};

// Carried bodies that are remembered, and the largest of them: those of the requests that all workers send
// in one round, and no more than a shard can do without.
inline constexpr size_t kMaxRememberedBodies = 16;
inline constexpr size_t kMaxRememberedBodyBytes = 16u << 10;

class Desk {
 public:
  // Whom a connection speaks for.
  struct Peer {
    uint64_t connection = 0;  // as whoever drives it calls it
    std::string client;
    bool wants_checksum = false;  // of the payloads it is sent
    std::optional<Life> worker = {};
  };

  explicit Desk(Shard& shard) : shard_(shard) {}

  // ---- what policy says

  // Nothing is ordinary any more.
  void close() { closed_ = true; }
  // A PUSH or PULL with exactly this body carries nothing new from now on for ever, nor waits for a version;
  // a PULL waits so long for values.
  void remember(const std::string& body, double wait_s);
  // That life of the rank attached here; 0 if none did.
  uint32_t newest_incarnation(uint32_t rank) const;
  void attached(const Life& life);

  // ---- requests

  // Whether the desk may act on the frame, be it announced or complete.
  bool is_ordinary(const Peer& peer, const Frame& frame);
  // REQUIRES: is_ordinary().
  BufferRef admit(Frame& frame) { return psstore::admit(shard_, frame); }
  // Adds the reply to a complete frame. False: it is not ordinary after all; nothing has changed.
  // Or parks it: then its reply is delivered, or it is left over.
  // REQUIRES: is_ordinary().
  bool answer(const Peer& peer, const std::shared_ptr<Frame>& frame, Replies& replies,
              double now_s);

  // ---- reads that wait

  // Throws Error(OVERLOADED).
  void park(Parked read, const Wanted& wanted) { parking_.park(std::move(read), wanted); }
  // The connection is gone.
  void forget(uint64_t connection);
  // Policy has done what they may wait for.
  void reached_version() { parking_.reached(shard_.version()); }
  void touched(std::span<const SliceEntry> slices) { parking_.touched(slices); }
  void touched_all() { parking_.touched_all(); }

  // Looks at those whose wait may be over.
  void wake(double now_s);
  // When wake(), or one of these two, may next give something.
  std::optional<double> next_wake() const;
  // Replies for connections other than the one that was served, in the order of their numbers.
  std::map<uint64_t, Replies> take_deliveries() { return std::exchange(deliveries_, {}); }
  // Reads that are no longer parked, and are policy's to answer.
  std::vector<Parked> take_left_over() { return std::exchange(left_over_, {}); }
  bool has_left_over() const { return !left_over_.empty(); }

 private:
  // A body that carries nothing.
  struct Known {
    std::string body;
    double wait_s;
  };

  // It is the latest from now on.
  const Known* known(const Frame& frame);
  double patience_s(const Frame& frame);
  void answer_write(const Peer& peer, Frame& frame, Replies& replies);
  bool answer_pull(Parked read, double now_s, Replies& replies);
  // To deliveries_; or parks them again, or leaves them over.
  void answer_due(std::vector<Parked> due, double now_s);
  void add_head(const Frame& frame, const SliceTable& table, std::optional<uint32_t> payload_crc,
                Replies& replies) const;

  Shard& shard_;
  bool closed_ = false;
  std::deque<Known> bodies_;                             // latest said first
  std::unordered_map<uint32_t, uint32_t> incarnations_;  // by rank
  Parking parking_;
  std::map<uint64_t, Replies> deliveries_;  // by connection
  std::vector<Parked> left_over_;
};

}  // namespace psstore
