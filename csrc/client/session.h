// One client's link to one shard, without a socket of its own choosing or a clock: what is asked, until it is answered.
//
//   ask()            numbers a request, and says it as soon as the link is up
//   connected()      a connection stands; say() is for the handshake
//   welcomed()       the link is up: what was not answered is said again, in order
//   disconnected()   requests stay, for the next connection
//
// Frames go out through `outgoing()`: send() writes them to the socket that was given, or whoever has no socket takes
// them from there. Bytes come in by receive() or feed(). Plain answers, to requests for slices and to control messages,
// are dealt with here, and told by tell_answered(). Any other frame waits in next_frame() for whoever drives the session,
// and so does all that came behind it.
//
// Payloads of a connection that shares memory go through that, in both directions (shm/client_memory.h).
//
// Not thread-safe: whoever drives it, one thread at a time. Askers may be Python's, and need the GIL. Only these
// let go of them: tell_answered(), tidy(), take(), and the destructor; and these ask them: ask(), welcomed(),
// keep_cancelled(), and for an asker that says so, receive() and next_frame().
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "client/link.h"
#include "client/outgoing.h"
#include "client/request.h"
#include "core/errors.h"
#include "shm/client_memory.h"
#include "wire/decoder.h"

namespace psstore {

// What a client's sessions carry from the coordinator to their shards.
class CarriedDecisions {
 public:
  struct News {
    uint64_t newest = 0;    // the last of `decisions`; 0: there are none
    std::string decisions;  // encoded
    uint64_t scaled = 0;    // the decision that `factor` is of; 0: none
    std::optional<double> factor;
  };

  CarriedDecisions() = default;
  CarriedDecisions(const CarriedDecisions&) = delete;
  CarriedDecisions& operator=(const CarriedDecisions&) = delete;
  virtual ~CarriedDecisions() = default;

  uint64_t last = 0;       // number of the last decision known
  bool is_scaled = false;  // the scale of that one is known, too
  // What a shard is to hear that was told every decision up to `told`.
  virtual News since(uint64_t told) = 0;
};

// Words that values were read which wait for the next request: of as many answers as may be leased a few are left.
inline constexpr size_t kMaxKeptReleases = 64;

class ClientSession {
 public:
  // Who says it.
  struct Speaker {
    uint32_t rank = 0;
    uint32_t incarnation = 0;
    bool checksum = false;  // of payloads
    bool keeps_releases =
        false;  // no value takes a step before this client asks for something again
  };

  explicit ClientSession(std::shared_ptr<CarriedDecisions> decisions);
  ClientSession(const ClientSession&) = delete;
  ClientSession& operator=(const ClientSession&) = delete;

  Speaker speaker;
  uint64_t next_request = 1;
  uint64_t last_write = 0;  // sequence of the last numbered write
  uint64_t told = 0;        // last decision sent on this connection
  uint64_t version = 0;     // of the shard, as last heard
  uint64_t scaled = 0;      // last decision whose scale the shard is known to have from here
  double last_heard_s = 0;
  // Whoever drives it looks at deadlines then at the latest: no word to it is needed of one that is no earlier.
  double looks_at = std::numeric_limits<double>::infinity();
  // Whoever drives it will tell what was read in a while.
  bool release_is_due = false;

  // ---- the connection ----

  void connected();
  // `fd`: its socket, if it has one here.
  void open(int fd, std::shared_ptr<TlsSession> tls = nullptr) { link_.open(fd, std::move(tls)); }
  // The shard is of this process.
  void open(std::shared_ptr<LocalEnd> shard) { link_.open(std::move(shard)); }
  // The handshake is over: the shard has taken writes up to that sequence.
  void welcomed(uint64_t at_version, uint64_t last_sequence, double now_s);
  void disconnected();
  bool is_up() const { return is_up_; }
  const ClientLink& link() const { return link_; }
  // Payloads of so many bytes go through that memory from now on.
  void share(std::shared_ptr<ClientMemory> memory, size_t from_bytes);
  const std::shared_ptr<ClientMemory>& memory() const { return memory_; }

  // ---- requests ----

  // Fills in its number, and the sequence of a write. Throws what a frame that is no frame does; then nothing was asked.
  void ask(std::shared_ptr<Request> request, double now_s);
  const std::deque<std::shared_ptr<Request>>& requests() const { return requests_; }
  // Null: there is none of that number.
  std::shared_ptr<Request> request(uint64_t number) const;
  // The same, and it is asked no more. Its memory is not needed any longer.
  std::shared_ptr<Request> take(uint64_t number);
  // Needs no memory of requests that were cancelled any longer: what is to be sent of it, or sent again, is kept as it
  // is now.
  void keep_cancelled();
  // A frame of somebody else's making goes out.
  void say(std::vector<std::byte> frame) { outgoing_.add(std::move(frame)); }
  // A request that told the scale of decision `told_scale`, or none (0), was answered by a shard at `at_version`.
  void heard(uint64_t at_version, uint64_t told_scale) {
    version = std::max(version, at_version);
    scaled = std::max(scaled, told_scale);
  }

  // ---- bytes ----

  Outgoing& outgoing() { return outgoing_; }
  const Outgoing& outgoing() const { return outgoing_; }
  // Writes what the kernel takes. False: the connection is lost.
  bool send();
  // There is something to send as soon as the kernel has room.
  bool awaits_room() const { return !outgoing_.done() && !link_.stream().awaits_peer(); }
  enum class Received : uint8_t {
    kAll,    // that there is now, or as much as was asked for
    kOther,  // up to a frame for next_frame()
    kLost,   // the connection is
  };
  // Reads up to `max_reads` times, as long as there is more. Throws what the peer did wrong, and again whenever more is
  // asked of it.
  Received receive(int max_reads, bool may_sleep);
  void feed(std::span<const std::byte> bytes);
  // A frame that answers no plain request, whole or announced; null: there is none. An announced one is to be
  // accepted or discarded.
  std::shared_ptr<Frame> next_frame();
  FrameDecoder& decoder() { return *decoder_; }
  // Tells askers of the answers that came. True: there were any.
  bool tell_answered();
  // Lets go of what is sent, and of who asked for it.
  void tidy() {
    outgoing_.tidy();
    spent_.clear();
  }

  // ---- what is under way ----

  // Nothing waits for the kernel.
  bool is_free() const { return link_.is_open() && is_up_ && outgoing_.done(); }
  // Nor is anything under way in either direction.
  bool is_quiet() const { return is_free() && requests_.empty() && !is_receiving(); }
  // But for one request, which may not be sent yet.
  bool asks_once() const {
    return link_.is_open() && is_up_ && requests_.size() == 1 && !is_receiving();
  }
  // The next request that carries anything tells it decisions, or a scale.
  bool has_news() const { return decisions_->is_scaled || told < decisions_->last; }
  // A frame with such a payload, or answer, is to go over the connection.
  bool carries(size_t num_bytes) const { return num_bytes < shared_from_bytes_; }
  // A write that was sent is not answered yet. Shards answer writes at once, so that something will soon come.
  bool answer_is_near() const {
    return last_write_out_ != 0 && position(last_write_out_) != requests_.end();
  }

  // ---- words that values were read in shared memory: each by itself would wake the shard ----

  // It goes with the next request, or with release().
  void add_release(uint64_t request) { releases_.push_back(request); }
  size_t num_releases() const { return releases_.size(); }
  // Has the shard be told now.
  void release();
  // The same, if it is not to wait. True: there is something to send.
  bool release_if_due();

 private:
  static constexpr size_t kNothingShared = std::numeric_limits<size_t>::max();

  using Requests = std::deque<std::shared_ptr<Request>>;

  Requests::const_iterator position(uint64_t number) const;
  bool is_receiving() const { return other_ != nullptr || decoder_->mid_frame(); }
  void renumber_writes(uint64_t last_applied);
  // As so many headers; there are none afterwards.
  void take_releases(std::byte* to);
  void say(const std::shared_ptr<Request>& request, double now_s);
  std::string body_of(Request& request, double now_s);
  LaidOut lay_out(const Request& request);
  void keep(Request& request);
  bool may_be_lent(const Request& request) const;
  // No memory is written to whose asker has forgotten it.
  void let_forgotten_pass();
  // False: a frame has come that is not for here.
  bool take_frames();
  bool take_frame(const std::shared_ptr<Frame>& frame);
  bool is_plain_answer(const Request& request, const Frame& frame) const;

  const std::shared_ptr<CarriedDecisions> decisions_;
  Requests requests_;  // in the order of their numbers
  bool is_up_ = false;
  ClientLink link_;
  Outgoing outgoing_;
  std::unique_ptr<FrameDecoder> decoder_;
  std::optional<Error> broken_;
  std::shared_ptr<Frame> other_;
  std::shared_ptr<Request> receiving_;  // its memory is being written to
  struct Answered {
    std::shared_ptr<Request> request;
    std::shared_ptr<Frame> frame;
  };
  std::deque<Answered> answered_;
  std::vector<std::shared_ptr<Request>> spent_;
  std::shared_ptr<ClientMemory> memory_;
  size_t shared_from_bytes_ = kNothingShared;
  std::vector<uint64_t> releases_;
  uint64_t last_write_said_ = 0;  // a request for data that is no read
  uint64_t last_write_out_ = 0;   // the same, of those that send() was called for
};

}  // namespace psstore
