// RequestLine, FramePlan, Sender, Terms and FastLane for Python.
#include "bindings/lane.h"

#include <pybind11/stl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <chrono>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/started.h"
#include "core/busy_poll.h"

namespace psstore::bindings {
namespace {

// How long the answers to small calls that were started wait, if nobody waits for them.
constexpr std::chrono::nanoseconds kPostponed = std::chrono::milliseconds{1};

// How long after a blocking call the own thread sleeps on, as the next one may follow and nothing is asked for. What
// comes unasked, as the end of a connection, is noticed so late.
constexpr std::chrono::nanoseconds kRest = std::chrono::milliseconds{100};

std::chrono::nanoseconds as_nanoseconds(double seconds) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(seconds));
}

// What a call of a function of Python returned.
py::object called(PyObject* result) {
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

// On Python's time.monotonic, which is the event loop's clock.
double now_s() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

// Nobody waits for them any more.
[[noreturn]] void cancel_and_throw(const py::list& results) {
  const py::error_already_set error;
  for (const py::handle one : results) {
    if (!py::isinstance<Frame>(one)) one.attr("future").attr("cancel")();
  }
  throw error;
}

// Of a request that is encoded already, and has no payload.
std::shared_ptr<Exchange> exchange_of(const RequestLine& line, std::string_view request) {
  const auto bytes = std::as_bytes(std::span(request));
  const Header header = parse_header(bytes);
  Call call{.peer = 0,
            .head = {bytes.begin(), bytes.end()},
            .payload = {},
            .destination = {},
            .request = header.request,
            .reply = Op{static_cast<uint8_t>(static_cast<uint8_t>(header.op) + 1)}};
  return std::make_shared<Exchange>(
      std::vector<Peer>{{line.fd(), &line.decoder().decoder(), nullptr}},
      std::vector<Call>{std::move(call)});
}

// What has come, and what is to be sent: to whoever drives the connection.
void leave(RequestLine& line, const std::shared_ptr<Exchange>& exchange) {
  PyDecoder& decoder = line.decoder();
  for (std::shared_ptr<Frame>* frame :
       {&exchange->calls().front().answer, &exchange->peers().front().other}) {
    if (*frame != nullptr) decoder.put_back(std::move(*frame));
  }
  line.leave(exchange->unsent(0), exchange);
}

}  // namespace

FastLane::FastLane(LoopParts parts)
    : loop_(std::move(parts)),
      acquire_(loop_.mutex.attr("acquire")),
      release_(loop_.mutex.attr("release")),
      wanted_(loop_.queue.attr("locked")),
      running_loop_(py::module_::import("_asyncio").attr("_get_running_loop")),
      set_running_loop_(py::module_::import("_asyncio").attr("_set_running_loop")),
      timer_(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)) {
  epoll_event event{.events = EPOLLIN | EPOLLET, .data = {.fd = timer_.get()}};
  if (epoll_ctl(loop_.idle, EPOLL_CTL_ADD, timer_.get(), &event) != 0) {
    PyErr_SetFromErrno(PyExc_OSError);
    throw py::error_already_set();
  }
}

// The loop, taken if nobody wants it; given back at the end. Meanwhile the own thread sleeps on, whatever arrives, and
// afterwards for a while, if the call was answered and nothing else is under way.
class FastLane::Hold {
 public:
  explicit Hold(FastLane& lane) : lane_(lane) {
    if (called(PyObject_CallOneArg(lane_.acquire_.ptr(), Py_False)).ptr() != Py_True) return;
    held_ = true;
    if (!lane_.nobody_waits()) {
      let_go();
      return;
    }
    lane_.busy_ = true;
    lane_.mute();
  }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;
  ~Hold() { release(); }

  explicit operator bool() const { return held_; }
  void answered(const Attempt& attempt) { rests_ = attempt.all_quiet(); }
  void release() {
    if (!held_) return;
    if (rests_ && lane_.nobody_waits()) {
      lane_.postpone(kRest);
    } else {
      lane_.unmute();
    }
    lane_.busy_ = false;
    let_go();
  }

 private:
  void let_go() {
    held_ = false;
    called(PyObject_CallNoArgs(lane_.release_.ptr()));
  }

  FastLane& lane_;
  bool held_ = false;
  bool rests_ = false;
};

// The same for as long as sending takes: whoever has the loop is waited for, and who listens goes on listening.
class FastLane::Visit {
 public:
  explicit Visit(const FastLane& lane) : lane_(lane) {
    if (called(PyObject_CallOneArg(lane_.acquire_.ptr(), Py_False)).ptr() == Py_True) return;
    if (lane_.busy_) eventfd_write(lane_.loop_.bell, 1);  // it lets go of the loop then
    called(PyObject_CallNoArgs(lane_.acquire_.ptr()));
  }
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;
  ~Visit() { called(PyObject_CallNoArgs(lane_.release_.ptr())); }

 private:
  const FastLane& lane_;
};

// Around what makes Python objects with the loop held, so that a garbage collection may strike: its finalizers
// must not wait for the loop, and see by the running one that they are in the middle of its work.
class FastLane::Inside {
 public:
  explicit Inside(const FastLane& lane) : lane_(lane), outer_(lane.running_loop_()) {
    lane_.set_running_loop_(lane_.loop_.loop);
  }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
  ~Inside() { lane_.set_running_loop_(outer_); }

 private:
  const FastLane& lane_;
  const py::object outer_;
};

bool FastLane::nothing_is_due() const {
  return py::len(loop_.ready) == 0 && called(PyObject_CallNoArgs(wanted_.ptr())).ptr() == Py_False;
}

void FastLane::ask(double timeout_s) const {
  const auto timeout = as_nanoseconds(timeout_s);
  const py::gil_scoped_release no_gil;
  pollfd sockets{loop_.sockets, POLLIN, 0};
  poll_busily({&sockets, 1}, timeout, timeout);
}

void FastLane::listen(bool listens) {
  muted_ = !listens;
  epoll_event event{};
  if (listens) event.events = EPOLLIN;
  event.data.fd = loop_.sockets;
  epoll_ctl(loop_.idle, EPOLL_CTL_MOD, loop_.sockets, &event);
}

// As the loop does it itself, so that no line of Python runs in between: an exception there would have it never sent.
void FastLane::await_room(const RequestLine& line) const {
  epoll_event event{.events = EPOLLIN | EPOLLOUT, .data = {.fd = line.fd()}};
  epoll_ctl(loop_.sockets, EPOLL_CTL_MOD, line.fd(), &event);
}

void FastLane::send_held() {
  if (loop_.holding.empty()) return;
  const Inside inside(*this);
  for (const py::handle one : loop_.holding) {
    auto& line = one.cast<RequestLine&>();
    if (!line.send_held()) await_room(line);
  }
  loop_.holding.attr("clear")();
}

// The own thread looks after what comes a little later, unless somebody waits for it before: woken by each
// answer, it would fight for the GIL with a thread that makes one call after the other.
void FastLane::postpone(std::chrono::nanoseconds time) {
  if (!muted_) listen(false);
  postponed_ = true;
  if (rings_within_ <= time) return;
  rings_within_ = time;
  const itimerspec once{.it_interval = {}, .it_value = {.tv_sec = 0, .tv_nsec = time.count()}};
  timerfd_settime(timer_.get(), 0, &once, nullptr);
}

py::list FastLane::leave_to_loop(Attempt& attempt, py::list& futures) {
  const Inside inside(*this);
  return attempt.hand_over(futures, now_s());
}

// Until all is answered no Python object is made while the loop is held, and so no line of Python can run here.
FastLane::Outcome FastLane::call(Attempt& attempt, py::list& futures, py::list& left) {
  Hold hold(*this);
  const bool possible = hold && loop_.holding.empty() && attempt.possible() &&
                        py::len(futures) >= attempt.num_frames();
  if (!possible) return Outcome::kNotNow;
  const bool all_answered = attempt.run(loop_.bell, loop_.busy);
  attempt.note_answers(now_s());
  if (all_answered) {
    attempt.tell_releases([this](const RequestLine& line) { await_room(line); });
    hold.answered(attempt);
    return Outcome::kAnswered;
  }
  left = leave_to_loop(attempt, futures);
  hold.release();  // a signal's handler may want the loop
  if (PyErr_CheckSignals() != 0) cancel_and_throw(left);
  return Outcome::kLeft;
}

std::optional<bool> FastLane::exchange(RequestLine& line, const py::bytes& request) {
  if (py::len(loop_.callers) != 1 || !nothing_is_due() || !line.asks_once()) return std::nullopt;
  const auto exchange = exchange_of(line, std::string_view(request));
  busy_ = true;
  bool answered = false;
  {
    const py::gil_scoped_release no_gil;
    answered = exchange->run(loop_.bell, loop_.busy);
  }
  busy_ = false;
  leave(line, exchange);
  return answered;
}

std::optional<bool> FastLane::start(StartedCall& call) {
  if (running_loop_().is(loop_.loop)) return std::nullopt;
  Attempt& attempt = call.attempt();
  const Visit visit(*this);
  // What was started before has to go before.
  if (has_ready() || !attempt.sendable()) return std::nullopt;
  const bool small = attempt.is_small();
  const bool waits = attempt.can_wait();
  if (!waits) send_held();
  const bool sent = attempt.send(waits);
  const Inside inside(*this);
  call.leave(now_s());
  if (!sent) {
    for (const RequestLine* line : attempt.lines()) await_room(*line);
  }
  if (waits) attempt.note_waiting(loop_.holding);
  const bool led = muted_ && !postponed_;
  if (!led && small) postpone(kPostponed);
  if (!led && !small) unmute();
  return attempt.looked_at(call.deadline_s());
}

void bind_lane(py::module_& m) {
  using namespace py::literals;
  py::class_<RequestLine>(m, "RequestLine", py::is_final())
      .def(py::init<py::dict>(), "requests"_a)
      .def_readwrite("next_request", &RequestLine::next_request)
      .def_readwrite("last_write", &RequestLine::last_write)
      .def_readwrite("told", &RequestLine::told)
      .def_readwrite("version", &RequestLine::version)
      .def_readwrite("scaled", &RequestLine::scaled)
      .def_readwrite("last_heard", &RequestLine::last_heard_s)
      .def_readwrite("looks_at", &RequestLine::looks_at)
      .def_property_readonly("has_started", &RequestLine::has_started)
      .def("next_frame", &RequestLine::next_frame, "decoder"_a, "now"_a)
      .def("receive", &RequestLine::receive, "now"_a)
      .def("hand_over", &RequestLine::hand_over)
      .def("next_deadline", &RequestLine::next_deadline)
      .def("heard", &RequestLine::heard, "version"_a, "scaled"_a, "now"_a)
      .def("connect", &RequestLine::connect, "fd"_a, "decoder"_a, "unsent"_a)
      .def("share", &RequestLine::share, "memory"_a, "from_bytes"_a)
      .def("add_release", &RequestLine::add_release, "request"_a)
      .def_property_readonly("num_releases", &RequestLine::num_releases)
      .def("take_releases",
           [](RequestLine& self) {
             std::string frames(self.release_bytes(), '\0');
             self.take_releases(reinterpret_cast<std::byte*>(frames.data()));
             return py::bytes(frames);
           })
      .def_readwrite("release_is_due", &RequestLine::release_is_due)
      .def("carries", &RequestLine::carries, "num_bytes"_a)
      .def("disconnect", &RequestLine::disconnect);
  py::class_<FramePlan>(m, "FramePlan", py::is_final())
      .def(py::init<const FrameMap&, std::vector<size_t>, std::vector<py::object>>(), "arrays"_a,
           "ways"_a, "tables"_a);
  py::class_<Sender>(m, "Sender", py::is_final())
      .def(py::init([](py::list lines, py::object request, uint32_t rank, uint32_t incarnation,
                       bool checksum, bool keeps_releases) {
             auto pointers = lines.cast<std::vector<RequestLine*>>();
             return Sender{std::move(pointers), std::move(lines), std::move(request), rank,
                           incarnation,         checksum,         keeps_releases};
           }),
           "lines"_a, py::kw_only(), "request"_a, "rank"_a, "incarnation"_a, "checksum"_a,
           "keeps_releases"_a)
      .def("has_told", &Sender::has_told, "decision"_a);
  py::class_<Terms>(m, "Terms", py::is_final())
      .def(py::init([](uint8_t op, double timeout_s, uint64_t round, py::object body,
                       std::vector<std::string> bodies, uint64_t told, uint64_t scaled) {
             return Terms{Op{op}, round, timeout_s, std::move(body), std::move(bodies),
                          told,   scaled};
           }),
           "op"_a, "timeout_s"_a, "round"_a = 0, "body"_a = py::none(),
           "bodies"_a = std::vector<std::string>{}, "told"_a = 0, "scaled"_a = 0)
      .def_readonly("timeout_s", &Terms::timeout_s);
  py::class_<FastLane>(m, "FastLane", py::is_final())
      .def(py::init([](py::object loop, py::object mutex, py::object queue, py::list callers,
                       py::object ready, py::list holding, int bell, int sockets, int idle,
                       double busy_s) {
             return FastLane({std::move(loop), std::move(mutex), std::move(queue),
                              std::move(callers), std::move(ready), std::move(holding), bell,
                              sockets, idle, as_nanoseconds(busy_s)});
           }),
           py::kw_only(), "loop"_a, "mutex"_a, "queue"_a, "callers"_a, "ready"_a, "holding"_a,
           "bell"_a, "sockets"_a, "idle"_a, "busy_s"_a = 0.0)
      .def_property_readonly("busy", &FastLane::busy)
      .def("ask", &FastLane::ask, "timeout_s"_a)
      .def("exchange", &FastLane::exchange, "line"_a, "request"_a)
      .def("mute", &FastLane::mute)
      .def("unmute", &FastLane::unmute)
      .def("woken", &FastLane::woken)
      .def("send_held", &FastLane::send_held)
      .def("hasten", &FastLane::hasten);
}

}  // namespace psstore::bindings
