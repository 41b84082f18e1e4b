// Tells a shard that this process lives, from a thread of its own that never needs the GIL: a worker in
// a long computation is slow, not dead.
//
// The thread writes the same small frame at intervals and reads nothing. It ends when stopped or when
// the connection is broken; whoever owns the heartbeat looks at alive() and decides what to do.
//
// Fork: the thread does not exist in a child. There the object only closes its descriptors, so that the
// connection still ends with the parent.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "core/mutex.h"
#include "tls/byte_stream.h"

namespace psstore {

class Heartbeat {
 public:
  // `fd`: a stream socket, blocking or not; a duplicate is used and closed at the end. `tls`: of that socket, null: bytes
  // go as they are. The first beat goes out at once. Throws BAD_ARGUMENT for an unusable argument, std::system_error if
  // the system refuses a descriptor or a thread.
  Heartbeat(int fd, std::string frame, double interval_s,
            std::shared_ptr<TlsSession> tls = nullptr);
  ~Heartbeat() { stop(); }
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  // False once the connection is broken, after stop(), and in a forked child.
  bool alive() const;

  // Ends the thread and closes the duplicate. Waits for a write in progress, never for the peer. May be
  // called again, and from any thread.
  void stop();

 private:
  using Clock = std::chrono::steady_clock;

  // A file descriptor that is closed with its owner.
  class Descriptor {
   public:
    Descriptor() = default;
    ~Descriptor() { close(); }
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    void open(int fd) { fd_ = fd; }
    void close();
    int get() const { return fd_; }

   private:
    int fd_ = -1;
  };

  void beat_until_stopped();
  // Sends what is left of the frame; false: the connection is broken.
  bool send_some(size_t& sent);
  // Waits for the next beat, or for room if a beat is under way; false: stopped or broken.
  bool wait(bool under_way, Clock::time_point next_beat) const;

  const pid_t owner_;  // the process that has the thread
  const std::string frame_;
  const Clock::duration interval_;

  Descriptor socket_;
  ByteStream stream_;
  // A pipe rather than a condition variable: the thread waits for room in the socket and for stop() in
  // one poll, and there is no lock that a fork could leave held.
  Descriptor wake_read_;
  Descriptor wake_write_;
  std::atomic<bool> alive_{true};

  Mutex stopping_;  // taken in the owner process only
  std::unique_ptr<std::thread> thread_;
};

}  // namespace psstore
