// Which plain writes (ASSIGN, ADD, RESTORE) were taken already, and which of their slices were refused.
//
// A client numbers its writes to a shard 1, 2, 3, ... and they are taken in that order, so one number per client says
// which were. What a write that comes again is answered is what it was answered first: of slices that were refused the
// client may not hear that they are applied. Several writes of a client may be unanswered when its connection is lost.
// It belongs to the table's state: a standby must have it.
// Thread-safe. Its locks come before a stripe's.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/errors.h"
#include "core/mutex.h"
#include "core/types.h"

namespace psstore {

// Clients remembered; the one that wrote longest ago is forgotten first. About 200 bytes each, beside what was refused.
// The next write of a forgotten client is refused, since its number is not 1.
inline constexpr size_t kMaxRememberedClients = 4096;

// Runs of refused slices remembered of one client; the oldest writes are forgotten first. As many as slices fit a frame
// (wire/limits.h): the last write's are always there. 24 bytes each, and none of a client that nothing was refused.
inline constexpr size_t kMaxRefusedRuns = 4096;

// Slices [begin, end) of a write, as they stand in its table, that were refused for one reason.
struct RefusedRun {
  uint64_t sequence = 0;
  uint32_t begin = 0;
  uint32_t end = 0;
  ErrorCode status = ErrorCode::OK;

  bool operator==(const RefusedRun&) const = default;
};

// What was refused of one client's writes.
struct Refusals {
  uint64_t forgotten = 0;  // the last write of which it is not known any more
  std::vector<RefusedRun>
      runs;  // of the writes after that one, in the order of the writes, and of their slices

  // Remembers the slices of that write, the latest one, that are not OK.
  void note(uint64_t sequence, std::span<const SliceEntry> entries);
  // Gives each slice of that write, which may be any before the next one, the status that it had first. Throws
  // Error(OVERLOADED) if that is not known any more.
  void recall(uint64_t sequence, std::span<SliceEntry> entries) const;
  // Throws Error(BAD_BODY) if it can't be what a client is remembered by whose last write is that one.
  void check(const std::string& client, uint64_t last) const;

  bool operator==(const Refusals&) const = default;
};

class WriteWindow {
 public:
  // One client's place. Hold `mutex` from take() until the write is applied.
  struct Client {
    Mutex mutex;
    uint64_t last GUARDED_BY(mutex) = 0;
    Refusals refusals GUARDED_BY(mutex);

    // True: `sequence` is the next write, and is now taken. False: it was taken before.
    // Throws Error(UNEXPECTED_MESSAGE) if writes before it are missing, and for 0.
    bool take(uint64_t sequence) REQUIRES(mutex);
    // It was not applied after all. REQUIRES: take() was the last call, and true.
    void give_back(uint64_t sequence) REQUIRES(mutex) { last = sequence - 1; }
  };

  explicit WriteWindow(size_t max_clients = kMaxRememberedClients) : max_clients_(max_clients) {}

  // The client's place, remembered as the latest.
  std::shared_ptr<Client> client(const std::string& name);

  // 0 if none is remembered. Remembers nothing.
  uint64_t last_sequence(const std::string& name);

  // All that it knows: the last sequence number of each client, the one that wrote longest ago first.
  std::vector<std::pair<std::string, uint64_t>> all();
  // That of another one. REQUIRES: it knows nothing.
  void load(const std::vector<std::pair<std::string, uint64_t>>& clients);

  // The refusals of each client that has any, the one that wrote longest ago first.
  std::vector<std::pair<std::string, Refusals>> refusals();
  // Those of another one's client, after load(). Throws Error(BAD_BODY) if they can't be that client's.
  void load_refusals(const std::string& name, Refusals refusals);

 private:
  struct Remembered {
    std::string name;
    std::shared_ptr<Client> client;
  };

  const size_t max_clients_;
  Mutex mutex_;
  std::list<Remembered> latest_first_ GUARDED_BY(mutex_);
  std::unordered_map<std::string, std::list<Remembered>::iterator> by_name_ GUARDED_BY(mutex_);
};

}  // namespace psstore
