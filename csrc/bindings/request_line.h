// The Python object RequestLine: what a session shares with those who send its requests without it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "bindings/common.h"
#include "bindings/decoder.h"
#include "client/outgoing.h"
#include "shm/client_memory.h"

namespace psstore::bindings {

class StartedCall;

// A request that was made without the session, and is not its own yet.
struct StartedRequest {
  uint64_t id;
  std::shared_ptr<StartedCall> call;
  size_t frame;  // of the call
};

// The numbers of a session's requests and the connection that it has now. Needs the GIL.
class RequestLine {
 public:
  // `requests`: the session's own, until they are answered.
  explicit RequestLine(py::dict requests) : requests_(std::move(requests)) {}

  uint64_t next_request = 1;
  uint64_t last_write = 0;  // sequence of the last numbered write
  uint64_t told = 0;        // last decision sent on this connection
  uint64_t version = 0;     // of the shard, as last heard
  uint64_t scaled = 0;      // last decision whose scale the shard is known to have from here
  double last_heard_s = 0;  // on the event loop's clock

  // A request that told the scale of decision `told_scale`, or none (0), was answered by a shard at `at_version`.
  void heard(uint64_t at_version, uint64_t told_scale, double now_s) {
    version = std::max(version, at_version);
    scaled = std::max(scaled, told_scale);
    last_heard_s = now_s;
  }

  // `unsent`: what waits to be written to `fd`.
  void connect(int fd, const py::object& decoder, py::object unsent) {
    decoder_ = &decoder.cast<PyDecoder&>();
    owner_ = decoder;
    unsent_ = std::move(unsent);
    fd_ = fd;
  }
  // What the ends share from now on: payloads of so many bytes go through that memory. `memory`: a ClientMemory.
  void share(const py::object& memory, size_t from_bytes) {
    memory_ = &memory.cast<ClientMemory&>();
    memory_owner_ = memory;
    shared_from_bytes_ = from_bytes;
  }
  void disconnect() {
    fd_ = -1;
    shared_from_bytes_ = kNothingShared;
    memory_ = nullptr;
    releases_.clear();
    release_is_due = false;
    decoder_ = nullptr;
    owner_ = unsent_ = memory_owner_ = py::none();
    held_ = {};
    last_write_out_ = 0;
  }

  // A frame with such a payload, or answer, is to go over it.
  bool carries(size_t num_bytes) const { return num_bytes < shared_from_bytes_; }
  // Null: nothing is shared.
  ClientMemory* memory() const { return memory_; }

  // ---- words that values were read in shared memory: each by itself would wake the shard ----

  // It goes with the next request, or with release().
  void add_release(uint64_t request) { releases_.push_back(request); }
  size_t num_releases() const { return releases_.size(); }
  size_t release_bytes() const { return releases_.size() * kHeaderBytes; }
  // As release_bytes() of frames; there are none afterwards.
  void take_releases(std::byte* to);
  // Sends them now. True: the kernel has taken all; as of send_held().
  bool send_releases();
  // Whoever drives the connection will send them in a while.
  bool release_is_due = false;

  bool connected() const { return fd_ >= 0; }
  // Nor does anything wait for the kernel.
  bool free() const { return connected() && py::len(unsent_) == 0; }
  // Nor is anything under way, in either direction.
  bool quiet() const {
    return free() && requests_.empty() && started_.empty() && !decoder_->mid_frame();
  }

  // But for one request of the session's.
  bool asks_once() const {
    return free() && py::len(requests_) == 1 && started_.empty() && !decoder_->mid_frame();
  }

  // REQUIRES: connected.
  int fd() const { return fd_; }
  PyDecoder& decoder() const { return *decoder_; }
  // What is left to whoever drives the session: an unanswered request, and pieces still to be written.
  void add(uint64_t id, const py::object& request) { requests_[py::int_(id)] = request; }
  void leave(std::span<const iovec> pieces, std::shared_ptr<void> owner);

  // ---- requests of calls that were started, until they are answered: see StartedCall ----

  // REQUIRES: its number is the highest so far.
  void add_started(StartedRequest request) { started_.push_back(std::move(request)); }
  void forget_started(uint64_t id);
  bool has_started() const { return !started_.empty(); }
  // The next frame of this line's connection that does not answer one of them.
  std::shared_ptr<Frame> next_frame(PyDecoder& decoder, double now_s);
  // Takes such answers from its connection, as much as a turn of the loop may. False: something else has come, or may
  // have: whoever drives the connection has to see to it.
  bool receive(double now_s);
  // All of them become the session's own.
  void hand_over();
  // Of those that are not the session's own.
  std::optional<double> next_deadline() const;

  // The session looks at deadlines then at the latest: no word to it is needed if theirs is no earlier.
  double looks_at = std::numeric_limits<double>::infinity();

  // ---- what waits to go out with what comes next: see FastLane::start ----

  // A write that was sent is not answered yet. Shards answer writes at once, so that something will soon come.
  bool answer_is_near() const {
    return last_write_out_ != 0 && (find_started(last_write_out_) != started_.end() ||
                                    requests_.contains(py::int_(last_write_out_)));
  }
  void sent_write(uint64_t id) { last_write_out_ = id; }
  // `owner` keeps the bytes. `newest_write`: the last write of these.
  void hold(std::span<const iovec> pieces, std::shared_ptr<void> owner, uint64_t newest_write) {
    for (const iovec& piece : pieces) {
      held_.outgoing.add({static_cast<const std::byte*>(piece.iov_base), piece.iov_len});
      held_.num_bytes += piece.iov_len;
    }
    held_.owners.push_back(std::move(owner));
    if (newest_write != 0) held_.newest_write = newest_write;
  }
  size_t held_bytes() const { return held_.num_bytes; }
  // Behind what waits for the kernel already. True: it has taken all, or the connection is lost, which others will
  // notice. Else the rest is left.
  bool send_held();

 private:
  static constexpr size_t kNothingShared = std::numeric_limits<size_t>::max();

  struct Held {
    Outgoing outgoing;
    std::vector<std::shared_ptr<void>> owners;
    size_t num_bytes = 0;
    uint64_t newest_write = 0;
  };

  using StartedRequests = std::deque<StartedRequest>;

  StartedRequests::const_iterator find_started(uint64_t id) const {
    const auto found = std::ranges::lower_bound(started_, id, {}, &StartedRequest::id);
    return found != started_.end() && found->id == id ? found : started_.end();
  }
  bool take(PyDecoder& decoder, const std::shared_ptr<Frame>& frame, double now_s);
  // False: a frame has come that answers none of them; it is put back.
  bool take_frames(double now_s);

  py::dict requests_;
  StartedRequests started_;  // in the order of their numbers
  int fd_ = -1;
  size_t shared_from_bytes_ = kNothingShared;
  PyDecoder* decoder_ = nullptr;
  py::object owner_ = py::none();  // of the decoder
  ClientMemory* memory_ = nullptr;
  py::object memory_owner_ = py::none();
  std::vector<uint64_t> releases_;
  py::object unsent_ = py::none();
  Held held_;
  uint64_t last_write_out_ = 0;  // a request
};

}  // namespace psstore::bindings
