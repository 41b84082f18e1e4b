// A call's way to the sockets, and back if it waits, without the event loop, as long as there is nothing else
// for the loop to do.
//
// A blocking call sends, waits and receives, so that no signal's handler finds it halfway: handlers run
// after it. It holds the loop's mutex all the while; who wants the loop writes to `wakeup_fd`. A call that is
// started only sends, or not even that: while the answer to a write is on its way, what is started next
// waits for whoever takes the loop for it, or for anything else, so that much goes out in one write. Nothing
// waits where nothing is under way, nor longer than the own thread sleeps then.
#pragma once

#include <chrono>
#include <optional>
#include <vector>

#include "bindings/call.h"
#include "core/descriptor.h"

namespace psstore::bindings {

// What the event loop's driver shares with it.
struct LoopParts {
  py::object loop;
  py::object mutex;  // threading.Lock: who has the loop
  py::object queue;  // threading.Lock: held by who wants it next
  py::list callers;  // who waits for something on it
  py::object ready;  // deque: what it has to do
  py::list corked;   // sessions on which something waits to go out: who takes the loop calls uncork
  int wakeup_fd;     // ends its poll
  int sockets;       // its epoll
  int idle;          // the epoll on which the own thread sleeps: it has `sockets` in it
  std::chrono::nanoseconds busy;  // how long a call asks for each answer before it sleeps
};

class CallDriver {
 public:
  explicit CallDriver(LoopParts parts);

  bool busy() const { return busy_; }

  // Waits, without sleeping, until the loop's sockets have something. Needs no loop.
  void ask(double timeout_s) const;

  // Whether the own thread wakes for what arrives. REQUIRES of these four: the loop is the caller's.
  void disarm() {
    if (armed_) set_armed(false);
    armed_later_ = false;
  }
  void arm() {
    if (!armed_) set_armed(true);
    armed_later_ = false;
  }
  // It is awake, be it by the timer.
  void woken() { rings_within_ = kNever; }
  void uncork();
  // What was asked of the loop and has not begun, as far as it is known without the loop.
  bool has_ready() const { return py::len(loop_.ready) != 0; }
  // The timer is not waited for. Needs no loop.
  void arm_now() {
    if (armed_later_) arm();
  }

  enum class Outcome {
    kNotNow,    // it is not the time for this; nothing was done
    kAnswered,  // all of it
    kLeft,      // to whoever drives its sessions, as far as it is not answered
  };
  // Sends all, and waits for the answers.
  Outcome call(Call& call);
  // Of a call that was left: nobody waits for it any more.
  void forget(Call& call) const;
  // Of a call of Python that has the loop and waits for nothing but this: the one request of its session. Sends it, and
  // waits for the answer as long as it may be near. True: it was told, and that was all. False: whoever drives the
  // session goes on. Empty: nothing was done.
  std::optional<bool> await(PySession& session);
  // Sends, or has it wait for the next answer if one is near. None: nothing was done. False: whoever drives the sessions
  // has to be told of a new deadline, or of what a shard of this process has answered.
  std::optional<bool> start(Call& call);

 private:
  class Hold;
  class Visit;
  class Inside;

  bool nobody_waits() const { return loop_.callers.empty() && nothing_is_due(); }
  // Nor does anybody want the loop.
  bool nothing_is_due() const;
  void set_armed(bool arms);
  void make(Call& call) const;
  // Writes what the kernel takes; the loop goes on with the rest as soon as it takes more.
  void send(ClientSession& session) const;
  void tell_releases(const Call& call) const;
  bool can_wait(const Call& call) const;
  void arm_later(std::chrono::nanoseconds time);

  LoopParts loop_;
  py::object acquire_;
  py::object release_;
  py::object wanted_;
  py::object running_loop_;
  py::object set_running_loop_;
  bool busy_ = false;
  Descriptor timer_;          // wakes the own thread
  bool armed_ = true;         // the own thread wakes for what arrives
  bool armed_later_ = false;  // not armed, until the timer rings
  static constexpr std::chrono::nanoseconds kNever = std::chrono::nanoseconds::max();
  std::chrono::nanoseconds rings_within_ = kNever;  // the timer, when it was set
};

}  // namespace psstore::bindings
