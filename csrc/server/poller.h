// All connections of a shard, driven on one thread inside of somebody else's event loop.
//
// The loop watches `fileno`, which is readable when a connection has something to do, and then takes a turn.
// A turn receives, lets the protocols answer, and sends, in rounds over all connections that are ready; it comes
// back only with what is for others. Between two small requests there is less time than a loop takes to
// come round. So a turn may linger: it waits for the next request, and for the end of its time.
//
//   loop ─► epoll of the loop ─► epoll of the poller ─► sockets, a timer      what the loop waits for
//   turn ───────────────────────►                                           what a turn waits for
//
// A round moves a bounded number of bytes of a connection. Of those that sent in bulk the last time one has a round
// before it is asked again who is ready, and one of those that were sent to in bulk: they take turns. So who
// pushes has half of us however many pull, and the other way round, and a small request waits for one round of each.
//
// A wait with a time-out of its own sets a timer of the processor and takes it back, for each request anew:
// 7 µs on a virtual machine, half of a small request. So the timer is a file, set once for a turn.
//
// One thread at a time.
#pragma once

#include <sys/epoll.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "server/connection.h"

namespace psstore {

class Poller {
 public:
  using Id = uint64_t;
  using Clock = Connection::Clock;

  // Nothing more will come, all is sent, and the poller has forgotten the connection. `error`: of the socket,
  // 0 if its peer ended it.
  struct Gone {
    int error;
  };
  // A frame; or what its bytes, or we, did wrong: then it is to be closed; or its end.
  using Happening = std::variant<std::shared_ptr<Frame>, std::exception_ptr, Gone>;
  struct Event {
    Id id;
    Happening what;
  };

  // `service`: of all protocols. `busy`: how long after a request a turn that lingers asks for the next one before
  // it sleeps, or `wakeup_fd` is readable: a file descriptor that becomes readable when the loop has something to do,
  // because of the poller or of anything else; -1: there is none. Throws std::system_error.
  explicit Poller(DataService& service, int wakeup_fd, std::chrono::nanoseconds busy = {});

  int fileno() const { return epoll_.get(); }

  // ---- connections

  // Decoder and protocol live until the connection is gone. `tls`: null: bytes go as they are. Throws
  // std::system_error.
  void add(Id id, Descriptor socket, std::shared_ptr<TlsSession> tls, FrameDecoder& decoder,
           ServerProtocol& protocol);
  // What others answer, in order with what the protocol does. REQUIRES: the connection is there.
  void send(Id id, Replies::Parts parts);
  // Sends what has come to connections otherwise: from the service, from others' requests. A turn does so by itself.
  void deliver();
  // See Connection::close(). REQUIRES: the connection is there.
  void close(Id id);
  // Cuts it off; nothing more is heard of it.
  void drop(Id id) { connections_.erase(id); }
  // Connections whose peers have stopped in the middle of a frame for so long.
  std::vector<Id> stalled(Clock::duration limit) const;
  // Those whose peers have read nothing for so long, of what is on its way to them.
  std::vector<Id> unread(Clock::duration limit);

  // ---- turns

  // The next event; empty: there is none, and `linger` is over, or a request has failed.
  std::optional<Event> turn(Clock::duration linger);

 private:
  struct Watched {
    Connection connection;
    uint32_t awaited;         // as epoll knows it
    uint64_t bulk_round = 0;  // its last one, as counted by bulk_rounds_
  };

  // Begins rounds of connections that are ready, as soon as one is. `timeout_ms`: as of epoll_wait.
  void collect(int timeout_ms);
  // Of those that are ready, who has one now, in order; the others are ready the next time still.
  std::span<epoll_event> choose(std::span<epoll_event> ready);
  // Goes on with the round of the first; empty: it is over.
  std::optional<Event> serve();
  std::optional<Event> serve(Id id, Connection& connection);
  // Whether a connection is ready by then; its round has begun.
  bool wait(Clock::time_point until);
  // The timer is to end a wait then; empty: not at all.
  void set_timer(std::optional<Clock::time_point> at);
  void watch(Id id, Watched& watched);

  DataService& service_;
  Descriptor epoll_;
  Descriptor timer_;
  std::optional<Clock::time_point> timer_at_;
  int wakeup_fd_;
  std::chrono::nanoseconds busy_;
  std::map<Id, Watched> connections_;
  uint64_t bulk_rounds_ = 0;
  std::deque<Id> ready_;  // whose rounds are not over
};

}  // namespace psstore
