// Where a shard answers the ordinary requests for data of all its connections, without anybody's judgement.
//
// A request is ordinary if nothing is to be decided about it: a push by the worker that its connection
// is attached as, a plain write, a pull whose values are all there; carrying nothing that the shard has
// not heard; with nobody waiting for what it writes. Policy is whose that is (protocol/slices.py): it
// tells the desk what it has to know when that changes, and gets every other request as it came.
// Nothing is done here that policy would do otherwise, only sooner.
//
// One thread at a time, as the connections of a shard are served.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <unordered_map>

#include "serve/frame_calls.h"
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
    std::string client;
    bool wants_checksum = false;  // of the payloads it is sent
    std::optional<Life> worker = {};
  };

  explicit Desk(Shard& shard) : shard_(shard) {}

  // ---- what policy says

  // Nothing is ordinary any more.
  void close() { closed_ = true; }
  // Whether somebody waits for what writes may bring.
  void watch_writes(bool watched) { writes_watched_ = watched; }
  // A PUSH or PULL with exactly this body carries nothing new, nor does it wait, from now on for ever.
  void remember(const std::string& body);
  // That life of the rank attached here; 0 if none did.
  uint32_t newest_incarnation(uint32_t rank) const;
  void attached(const Life& life);

  // ---- requests

  // Whether the desk may act on the frame, be it announced or complete.
  bool is_ordinary(const Peer& peer, const Frame& frame) const;
  // REQUIRES: is_ordinary().
  BufferRef admit(Frame& frame) { return psstore::admit(shard_, frame); }
  // Adds the reply to a complete frame. False: it is not ordinary after all; nothing has changed.
  // REQUIRES: is_ordinary().
  bool answer(const Peer& peer, Frame& frame, Replies& replies);

 private:
  bool carries_nothing(const Frame& frame) const;
  void answer_write(const Peer& peer, Frame& frame, Replies& replies);
  bool answer_pull(const Peer& peer, const Frame& frame, Replies& replies);
  void add_head(const Frame& frame, const SliceTable& table, std::optional<uint32_t> payload_crc,
                Replies& replies) const;

  Shard& shard_;
  bool closed_ = false;
  bool writes_watched_ = false;
  std::deque<std::string> bodies_;                       // latest first
  std::unordered_map<uint32_t, uint32_t> incarnations_;  // by rank
};

}  // namespace psstore
