// Which plain writes (ASSIGN, ADD) were applied already: the last sequence number of each client.
//
// A client numbers its writes to a shard 1, 2, 3, ... and sends one at a time, so one number per
// client is the whole window. It belongs to the table's state: a restored table must have it.
// Thread-safe. Its locks come before a stripe's.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/mutex.h"

namespace psstore {

// Clients remembered; the one that wrote longest ago is forgotten first. About 200 bytes each. The
// next write of a forgotten client is refused, since its number is not 1.
inline constexpr size_t kMaxRememberedClients = 4096;

class WriteWindow {
 public:
  // One client's place. Hold `mutex` from take() until the write is applied.
  struct Client {
    Mutex mutex;
    uint64_t last GUARDED_BY(mutex) = 0;

    // True: `sequence` is the next write, and is now taken. False: it was applied before.
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
