// Reads that wait, each by the first thing that it waits for.
//
// While the layers of an early round arrive hundreds of reads may wait, and each event looks at those
// alone that it concerns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "server/connected_client.h"
#include "wire/frame.h"

namespace psstore {

// Reads of one connection that may wait at a time, since each holds its table and its body. In frames of 4 MiB
// they ask for 4 GiB.
inline constexpr size_t kMaxPendingReads = 1024;
// And bytes of those: rows are asked for by their ids.
inline constexpr size_t kMaxPendingBytes = size_t{256} << 20;

// A PULL or NORM that waits for a decision, for what a decision lacks, or for a first value.
struct PendingRead {
  std::shared_ptr<ConnectedClient> client;
  std::shared_ptr<Frame> frame;
  uint64_t at_least;  // the version that the shard has to have
  double wait_s;
  double until_s;  // on the clock of whoever drives the shard
  Lap waiting = {};
};

// What a read waits for: the shard is at this version, or later; or something is done to this key's slot.
struct AtVersion {
  uint64_t number;
};
struct AtKey {
  Key key;
};
using Wanted = std::variant<AtVersion, AtKey>;

// A read is here from add() until take_due() or forget() gives it up; it may be added again.
class PendingReads {
 public:
  // Throws Error(OVERLOADED) if too many reads of its connection wait, or too many bytes of them.
  void add(PendingRead read, const Wanted& wanted);
  // The connection is gone: nobody waits there.
  void forget(uint64_t connection);

  // ---- events

  void reached(uint64_t version);
  void touched(std::span<const SliceEntry> slices);
  void touched_all();

  // ---- whose wait may be over

  // By an event, in the order of arrival. They are no longer here.
  std::vector<PendingRead> take_due();
  // By an event or by time.
  std::vector<PendingRead> take_due(double now_s);
  // When take_due() may next give something: at once after an event.
  std::optional<double> next_wake() const;

 private:
  using Ticket = uint64_t;  // in the order of arrival, so that equal seeds give equal runs
  struct Place {
    PendingRead read;
    Wanted wanted;
    size_t num_bytes;  // of its request
  };

  PendingRead remove(Ticket ticket);

  Ticket next_ticket_ = 0;
  std::map<Ticket, Place> places_;
  std::set<std::pair<uint64_t, Ticket>> by_version_;
  std::unordered_map<Key, std::set<Ticket>> by_key_;
  std::set<std::pair<double, Ticket>> by_end_;
  std::set<Ticket> due_;
  struct Waiting {
    size_t num_reads = 0;
    size_t num_bytes = 0;
  };
  std::unordered_map<uint64_t, Waiting> waiting_;  // of each connection that has any
};

}  // namespace psstore
