// Requests and their replies over connected sockets, without Python: for a caller that waits for just these.
//
// Sends what is asked, in order, and receives the answers where they are to live, until all are there or
// until something is to be done that is no exchange: another frame came, a connection ended, a bell rang,
// a signal, nothing for a while. Then whoever drives the connections goes on where this stopped: what is
// not sent is told by `unsent`, what came in between is in the decoder or in `Peer::other`.
//
// Not thread-safe: whoever has the connections, one thread at a time.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "client/outgoing.h"
#include "shm/client_memory.h"
#include "wire/decoder.h"
#include "wire/frame.h"

namespace psstore {

// Nothing for so long: the wait is one for other workers, or for a lost shard, and not for a reply.
inline constexpr std::chrono::milliseconds kQuiet{10};
// Whoever shares the connections is not kept longer than this, however much is under way.
inline constexpr std::chrono::milliseconds kLongestExchange{1000};

// A connection. What was sent over it before is sent, and no frame is in the middle of arriving.
struct Peer {
  int fd;  // a plain recv sleeps for a moment at most, as nobody can end it; nobody else's sleeps at all
  FrameDecoder* decoder;
  std::shared_ptr<Frame> other =
      nullptr;  // set: a frame that answers none of the calls, whole or announced
};

// One request: one frame to `peer`, one back.
struct Call {
  using Ranges = std::span<const std::span<std::byte>>;

  size_t peer;
  std::vector<std::byte> head;
  Ranges payload;      // what follows the head
  Ranges destination;  // where the payload of the answer goes; none: it has none
  uint64_t request;
  Op reply;
  // Where the answer's values may lie instead of following it; null: nowhere else.
  const ClientMemory* memory = nullptr;

  // It is what was asked for, whole or announced.
  bool is_answered_by(const Frame& frame) const;

  bool receiving = false;                   // the decoder writes to `destination`
  std::shared_ptr<Frame> answer = nullptr;  // whole; null: not there yet
};

// Copies the values of a complete answer from where they lie. False: they don't lie there, or are not those that were
// asked for; nothing is copied. REQUIRES: call.is_answered_by(answer), which is shared.
bool read_shared(const Call& call, const Frame& answer);

class Exchange {
 public:
  // The memory of the calls' ranges stays as it is until all are answered.
  Exchange(std::vector<Peer> peers, std::vector<Call> calls);

  // Hands the kernel what it takes, and receives nothing. True: that was all.
  bool send();
  // True: all is sent, and every call is answered. `bell`: a file descriptor that ends it when it becomes
  // readable, soon. `busy`: how long it asks for each answer before it sleeps.
  bool run(int bell, std::chrono::nanoseconds busy = {});

  std::span<Peer> peers() { return peers_; }
  std::span<Call> calls() { return calls_; }
  bool all_sent() const;
  // What is still to be written to a peer, in order.
  std::span<const iovec> unsent(size_t peer) const { return outputs_[peer].pieces(); }

 private:
  // An answer that comes before its request is sent is not the end: the next frame would follow half of one.
  bool over() const;
  // False: there is something else to do.
  bool sleep_in_recv();
  bool wait(int bell, std::chrono::nanoseconds busy);
  // `flags`: of its first recv.
  bool receive(size_t peer, int flags);
  bool take_frames(size_t peer);
  Call* asked_by(size_t peer, const Frame& reply);

  std::vector<Peer> peers_;
  std::vector<Call> calls_;
  std::vector<Outgoing> outputs_;  // of each peer
  size_t num_unanswered_;
};

}  // namespace psstore
