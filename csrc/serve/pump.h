// All connections of a shard, driven on one thread inside of somebody else's event loop.
//
// The loop watches `fileno`, which is readable when a connection has something to do, and then takes a turn.
// A turn receives, lets the ports answer, and sends, in rounds over all connections that are ready; it comes
// back only with what is for others. Between two small requests there is less time than a loop takes to
// come round. So a turn may linger: it waits for the next request, and for the loop's own bell.
//
//   loop ─► epoll of the loop ─► epoll of the pump ─► sockets      what the loop waits for
//   turn ─► both of them                                           what a turn waits for
//
// One thread at a time.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "serve/link.h"

namespace psstore {

class Pump {
 public:
  using Id = uint64_t;
  using Clock = Link::Clock;

  // Nothing more will come, all is sent, and the pump has forgotten the connection. `error`: of the socket,
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

  // `desk`: of all ports. `bell`: a file descriptor that becomes readable when the loop has something to do,
  // because of the pump or of anything else; -1: there is none, and no turn lingers. `busy`: how long after
  // a request a turn that lingers asks for the next one before it sleeps. Throws std::system_error.
  explicit Pump(Desk& desk, int bell, std::chrono::nanoseconds busy = {});

  int fileno() const { return epoll_.get(); }

  // ---- connections

  // Decoder and port live until the connection is gone. Throws std::system_error.
  void add(Id id, Descriptor socket, FrameDecoder& decoder, Port& port);
  // What others answer, in order with what the port does. REQUIRES: the connection is there.
  void send(Id id, Replies::Parts parts);
  // See Link::close(). REQUIRES: the connection is there.
  void close(Id id);
  // Cuts it off; nothing more is heard of it.
  void drop(Id id) { links_.erase(id); }
  // Connections whose peers have stopped in the middle of a frame for so long.
  std::vector<Id> stalled(Clock::duration limit) const;

  // ---- turns

  // The next event; empty: there is none, and `linger` is over, the bell rings, or the desk has left
  // something over.
  std::optional<Event> turn(Clock::duration linger);

 private:
  struct Watched {
    Link link;
    uint32_t awaited;  // as epoll knows it
  };

  // Begins a round of each connection that is ready.
  void collect();
  // Goes on with the round of the first; empty: it is over.
  std::optional<Event> serve();
  std::optional<Event> serve(Id id, Link& link);
  // What the desk has for connections that were not served.
  void deliver();
  // Whether a connection is ready by then.
  bool wait(Clock::time_point until) const;
  void watch(Id id, Watched& watched);

  Desk& desk_;
  Descriptor epoll_;
  int bell_;
  std::chrono::nanoseconds busy_;
  std::map<Id, Watched> links_;
  std::deque<Id> ready_;  // whose rounds are not over
};

}  // namespace psstore
