// What a shard knows of the client at the other end of a connection, as far as data is concerned.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/traffic.h"
#include "shm/push_arena.h"
#include "shm/seen_memory.h"
#include "table/decision.h"
#include "table/gather.h"

namespace psstore {

// Answers that a connection may read in shared memory at a time; later ones go over the stream. As many as
// reads may wait: what they refer to can't be freed, and is replaced out of place.
inline constexpr size_t kMaxLeases = 1024;

// Answers that a client reads where they lie: their values stay what they are meanwhile.
class Leases {
 public:
  bool has_room(uint64_t max_bytes) const {
    return leases_.size() < kMaxLeases && num_bytes_ < max_bytes;
  }
  void begin(uint64_t request, std::vector<Piece> pieces, double now_s) {
    end(request);
    Lease lease{std::move(pieces), 0, now_s};
    for (const Piece& piece : lease.pieces) lease.num_bytes += piece.num_bytes;
    num_bytes_ += lease.num_bytes;
    leases_.emplace(request, std::move(lease));
  }
  // It was read.
  void end(uint64_t request) {
    const auto found = leases_.find(request);
    if (found == leases_.end()) return;
    num_bytes_ -= found->second.num_bytes;
    leases_.erase(found);
  }
  bool any_since(double before_s) const {
    return std::ranges::any_of(leases_,
                               [=](const auto& entry) { return entry.second.since_s <= before_s; });
  }
  size_t size() const { return leases_.size(); }
  void clear() { leases_.clear(), num_bytes_ = 0; }

 private:
  struct Lease {
    std::vector<Piece> pieces;
    uint64_t num_bytes;
    double since_s;
  };

  std::map<uint64_t, Lease> leases_;  // by request
  uint64_t num_bytes_ = 0;
};

struct ConnectedClient {
  uint64_t connection = 0;      // as whoever drives it calls it
  std::string writer;           // who numbers plain writes
  bool wants_checksum = false;  // of the payloads it is sent
  std::optional<Life> worker = {};
  std::shared_ptr<Traffic> traffic = {};  // that worker's
  // The memory that it pushes through, once its client has it.
  std::vector<std::shared_ptr<PushArena>> arenas = {};
  // Of a standby's shard: what the standby sees of what the shard reads from.
  std::vector<std::shared_ptr<SeenMemory>> seen = {};
  // Its client is in this process: it knows where values lie, and has the device wait for them.
  bool is_own = false;
  bool follows = false;     // it is a standby of this shard
  bool leads = false;       // it is the shard that this one is a standby of
  uint64_t last_block = 0;  // of the device's, that the client was told of
  Leases leases = {};
};

}  // namespace psstore
