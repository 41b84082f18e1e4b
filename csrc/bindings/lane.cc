// RequestLine, FramePlan and FastLane for Python: a blocking call's way to the sockets and back without
// the event loop, as long as there is nothing else for the loop to do.
//
// One call numbers, encodes, sends, waits and receives, so that no signal's handler finds it halfway:
// handlers run after it. It holds the loop's mutex all the while; who wants the loop rings the bell.
#include <pybind11/stl.h>
#include <sys/epoll.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/frame_map.h"
#include "bindings/request_line.h"
#include "client/exchange.h"
#include "wire/encoder.h"

namespace psstore::bindings {
namespace {

// The frames of a layout.
class FramePlan {
 public:
  FramePlan(const FrameMap& map, std::vector<size_t> shards, std::vector<SliceTable> tables)
      : map_(map), shards_(std::move(shards)), tables_(std::move(tables)) {
    if (shards_.size() != map_.num_frames() || tables_.size() != map_.num_frames()) {
      throw py::value_error("every frame of the map has one shard and one table");
    }
  }

  const FrameMap& map() const { return map_; }
  size_t num_frames() const { return shards_.size(); }
  size_t shard(size_t frame) const { return shards_[frame]; }
  const SliceTable& table(size_t frame) const { return tables_[frame]; }

 private:
  FrameMap map_;
  std::vector<size_t> shards_;
  std::vector<SliceTable> tables_;
};

// What a call says of all its frames.
struct Asked {
  Op op;
  bool sends;     // the arrays, else it receives into them
  bool numbered;  // its frames are writes with a sequence
  uint64_t round;
  uint32_t rank;
  uint32_t incarnation;
  bool checksum;
  uint64_t told;                  // the last decision that the bodies tell
  std::vector<py::bytes> bodies;  // by shard
};

// What the event loop's driver shares with the lane.
struct LoopParts {
  py::object loop;
  py::object mutex;  // threading.Lock: who has the loop
  py::object queue;  // threading.Lock: held by who wants it next
  py::list callers;  // who waits for something on it
  py::object ready;  // deque: what it has to do
  int bell;          // ends its poll
  int sockets;       // its epoll
  int idle;          // the epoll on which the own thread sleeps: it has `sockets` in it
};

class FastLane {
 public:
  explicit FastLane(LoopParts parts)
      : loop_(std::move(parts)),
        acquire_(loop_.mutex.attr("acquire")),
        release_(loop_.mutex.attr("release")),
        wanted_(loop_.queue.attr("locked")),
        running_loop_(py::module_::import("_asyncio").attr("_get_running_loop")),
        set_running_loop_(py::module_::import("_asyncio").attr("_set_running_loop")) {}

  bool busy() const { return busy_; }

  // Whether all is answered, and nothing failed; and of each frame the answer, or the request that its session has now.
  using Outcome = std::pair<bool, py::list>;

  // None: it is not the time, or not the kind of arrays, for this; nothing was done.
  std::optional<Outcome> call(const FramePlan& plan, const py::sequence& arrays,
                              const std::vector<RequestLine*>& lines, const Asked& asked,
                              const py::list& requests);

 private:
  class Hold;

  bool nobody_waits() const;
  void mute(bool muted) const;

  LoopParts loop_;
  py::object acquire_;
  py::object release_;
  py::object wanted_;
  py::object running_loop_;
  py::object set_running_loop_;
  bool busy_ = false;
};

// The loop, taken; given back at the end. Meanwhile the own thread sleeps on, whatever arrives, and the
// loop is the running one: a garbage collection's finalizers must not wait for it.
class FastLane::Hold {
 public:
  explicit Hold(FastLane& lane) : lane_(lane) {
    if (!lane_.running_loop_().is_none() || !lane_.acquire_(false).cast<bool>()) return;
    lane_.busy_ = held_ = true;
    lane_.set_running_loop_(lane_.loop_.loop);
    lane_.mute(true);
  }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;
  ~Hold() { release(); }

  explicit operator bool() const { return held_; }
  void release() {
    if (!std::exchange(held_, false)) return;
    lane_.mute(false);
    lane_.busy_ = false;
    lane_.set_running_loop_(py::none());
    lane_.release_();
  }

 private:
  FastLane& lane_;
  bool held_ = false;
};

bool FastLane::nobody_waits() const {
  return loop_.callers.empty() && py::len(loop_.ready) == 0 && !wanted_().cast<bool>();
}

void FastLane::mute(bool muted) const {
  epoll_event event{};
  if (!muted) event.events = EPOLLIN;
  event.data.fd = loop_.sockets;
  epoll_ctl(loop_.idle, EPOLL_CTL_MOD, loop_.sockets, &event);
}

// ---- one call ---------------------------------------------------------------------------------------

// The frames of one call, on their way.
class Attempt {
 public:
  Attempt(const FramePlan& plan, std::vector<Segments> memories,
          const std::vector<RequestLine*>& lines, const Asked& asked, const py::list& requests)
      : plan_(plan),
        memories_(std::move(memories)),
        lines_(lines),
        asked_(asked),
        requests_(requests) {}

  bool possible() const {
    for (size_t frame = 0; frame < plan_.num_frames(); ++frame) {
      if (!line(frame).quiet()) return false;
    }
    return true;
  }

  // True: all is answered.
  bool run(int bell) {
    make();
    const py::gil_scoped_release released;
    return exchange_->run(bell);
  }

  bool succeeded() const {
    return std::ranges::none_of(exchange_->calls(), [](const Call& call) {
      return first_failure(call.answer->table).has_value();
    });
  }

  py::list answers() const {
    py::list made;
    for (const Call& call : exchange_->calls()) made.append(py::cast(call.answer));
    return made;
  }

  // The same, with the requests that are not answered in their places: they are their sessions' now.
  py::list hand_over();

 private:
  RequestLine& line(size_t frame) const { return *lines_.at(plan_.shard(frame)); }
  void make();
  Call make_call(size_t frame);
  void leave_rest(const py::object& memories);

  const FramePlan& plan_;
  std::vector<Segments> memories_;
  const std::vector<RequestLine*>& lines_;
  const Asked& asked_;
  const py::list& requests_;
  std::vector<size_t> peer_of_;   // by shard; none: lines_.size()
  std::vector<size_t> shard_of_;  // by peer
  std::vector<uint64_t> writes_;  // sequence of each frame
  std::shared_ptr<Exchange> exchange_;
};

void Attempt::make() {
  std::vector<Peer> peers;
  peer_of_.assign(lines_.size(), lines_.size());
  for (size_t frame = 0; frame < plan_.num_frames(); ++frame) {
    size_t& peer = peer_of_[plan_.shard(frame)];
    if (peer != lines_.size()) continue;
    peer = peers.size();
    peers.push_back({line(frame).fd(), &line(frame).decoder().decoder(), nullptr});
    shard_of_.push_back(plan_.shard(frame));
  }
  std::vector<Call> calls;
  calls.reserve(plan_.num_frames());
  for (size_t frame = 0; frame < plan_.num_frames(); ++frame) calls.push_back(make_call(frame));
  exchange_ = std::make_shared<Exchange>(std::move(peers), std::move(calls));
}

Call Attempt::make_call(size_t frame) {
  const Segments& memory = memories_[frame];
  RequestLine& to = line(frame);
  FrameParts parts{.op = asked_.op,
                   .request = to.next_request,
                   .round = asked_.round,
                   .rank = asked_.rank,
                   .incarnation = asked_.incarnation,
                   .table = plan_.table(frame).entries()};
  if (!asked_.bodies.empty()) {
    const std::string_view body = asked_.bodies.at(plan_.shard(frame));
    parts.body = std::as_bytes(std::span(body));
  }
  if (asked_.sends) {
    parts.payload_bytes = memory.num_bytes();
    if (asked_.checksum) parts.payload_crc = memory.checksum();
  }
  check_parts(parts);
  if (asked_.numbered) parts.sequence = ++to.last_write;
  ++to.next_request;
  to.told = std::max(to.told, asked_.told);
  writes_.push_back(parts.sequence);
  Call call{.peer = peer_of_[plan_.shard(frame)],
            .head = std::vector<std::byte>(parts.encoded_bytes()),
            .payload = {},
            .destination = {},
            .request = parts.request,
            .reply = Op{static_cast<uint8_t>(static_cast<uint8_t>(asked_.op) + 1)}};
  encode_frame(parts, call.head.data());
  (asked_.sends ? call.payload : call.destination) = memory.ranges();
  return call;
}

py::list Attempt::hand_over() {
  // Moving a Segments leaves its ranges where they are, for the exchange.
  py::list memories;
  for (Segments& memory : memories_) memories.append(py::cast(std::move(memory)));
  py::list results = answers();
  const std::span<Call> calls = exchange_->calls();
  for (size_t frame = 0; frame < calls.size(); ++frame) {
    const py::object memory = memories[frame];
    if (calls[frame].receiving) line(frame).decoder().keep(memory);
    if (calls[frame].answer != nullptr) continue;
    const py::object request = requests_[frame];
    request.attr("id") = calls[frame].request;
    request.attr("sequence") = writes_[frame];
    request.attr(asked_.sends ? "payload" : "destination") = memory;
    line(frame).add(calls[frame].request, request);
    results[frame] = request;
  }
  leave_rest(memories);
  return results;
}

// To whoever drives the connections: what was fetched in vain, and what is still to be written.
void Attempt::leave_rest(const py::object& memories) {
  const py::capsule heads(new std::shared_ptr<Exchange>(exchange_),
                          [](void* held) { delete static_cast<std::shared_ptr<Exchange>*>(held); });
  const py::object owner = py::make_tuple(heads, memories);
  for (size_t peer = 0; peer < shard_of_.size(); ++peer) {
    RequestLine& to = *lines_[shard_of_[peer]];
    to.decoder().put_back(std::move(exchange_->peers()[peer].other));
    for (const iovec& piece : exchange_->unsent(peer)) {
      to.leave(make_readonly_view(owner, {static_cast<std::byte*>(piece.iov_base), piece.iov_len}));
    }
  }
}

// Nobody waits for them any more.
[[noreturn]] void cancel_and_throw(const py::list& results) {
  const py::error_already_set error;
  for (const py::handle one : results) {
    if (!py::isinstance<Frame>(one)) one.attr("future").attr("cancel")();
  }
  throw error;
}

std::optional<FastLane::Outcome> FastLane::call(const FramePlan& plan, const py::sequence& arrays,
                                                const std::vector<RequestLine*>& lines,
                                                const Asked& asked, const py::list& requests) {
  std::optional<std::vector<Segments>> memories =
      plan.map().of_arrays(arrays, /*writable=*/!asked.sends);
  if (!memories) return std::nullopt;
  Hold hold(*this);
  Attempt attempt(plan, std::move(*memories), lines, asked, requests);
  if (!hold || !nobody_waits() || !attempt.possible()) return std::nullopt;
  if (attempt.run(loop_.bell)) return Outcome{attempt.succeeded(), attempt.answers()};
  py::list results = attempt.hand_over();
  hold.release();  // a signal's handler may want the loop
  if (PyErr_CheckSignals() != 0) cancel_and_throw(results);
  return Outcome{false, std::move(results)};
}

}  // namespace

void bind_lane(py::module_& m) {
  using namespace py::literals;
  py::class_<RequestLine>(m, "RequestLine", py::is_final())
      .def(py::init<py::dict>(), "requests"_a)
      .def_readwrite("next_request", &RequestLine::next_request)
      .def_readwrite("last_write", &RequestLine::last_write)
      .def_readwrite("told", &RequestLine::told)
      .def("connect", &RequestLine::connect, "fd"_a, "decoder"_a, "unsent"_a)
      .def("disconnect", &RequestLine::disconnect);
  py::class_<FramePlan>(m, "FramePlan", py::is_final())
      .def(py::init<const FrameMap&, std::vector<size_t>, std::vector<SliceTable>>(), "arrays"_a,
           "shards"_a, "tables"_a);
  py::class_<FastLane>(m, "FastLane", py::is_final())
      .def(py::init([](py::object loop, py::object mutex, py::object queue, py::list callers,
                       py::object ready, int bell, int sockets, int idle) {
             return FastLane({std::move(loop), std::move(mutex), std::move(queue),
                              std::move(callers), std::move(ready), bell, sockets, idle});
           }),
           py::kw_only(), "loop"_a, "mutex"_a, "queue"_a, "callers"_a, "ready"_a, "bell"_a,
           "sockets"_a, "idle"_a)
      .def_property_readonly("busy", &FastLane::busy)
      .def(
          "call",
          [](FastLane& self, const FramePlan& plan, const py::sequence& arrays,
             const std::vector<RequestLine*>& lines, const py::list& requests, uint8_t op,
             bool sends, bool numbered, uint64_t round, uint32_t rank, uint32_t incarnation,
             bool checksum, uint64_t told, std::vector<py::bytes> bodies) {
            const Asked asked{Op{op},   sends, numbered,         round, rank, incarnation,
                              checksum, told,  std::move(bodies)};
            return self.call(plan, arrays, lines, asked, requests);
          },
          "plan"_a, "arrays"_a, "lines"_a, "requests"_a, "op"_a, "sends"_a, "numbered"_a, "round"_a,
          "rank"_a, "incarnation"_a, "checksum"_a, "told"_a, "bodies"_a);
}

}  // namespace psstore::bindings
