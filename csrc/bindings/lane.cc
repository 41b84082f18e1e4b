// RequestLine, FramePlan, Sender, Terms and FastLane for Python: a call's way to the sockets, and back if
// it waits, without the event loop, as long as there is nothing else for the loop to do.
//
// A blocking call numbers, encodes, sends, waits and receives, so that no signal's handler finds it
// halfway: handlers run after it. It holds the loop's mutex all the while; who wants the loop rings the
// bell. A call that is started numbers, encodes and sends.
#include <pybind11/stl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>

#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/attempt.h"
#include "core/busy_poll.h"
#include "core/descriptor.h"

namespace psstore::bindings {
namespace {

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
  std::chrono::nanoseconds busy;  // how long a call asks for each answer before it sleeps
};

// How long the answers to small calls that were started wait, if nobody waits for them.
constexpr std::chrono::nanoseconds kPostponed = std::chrono::milliseconds{1};

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

class FastLane {
 public:
  explicit FastLane(LoopParts parts)
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

  bool busy() const { return busy_; }

  // Waits, without sleeping, until the loop's sockets have something. Needs no loop.
  void ask(double timeout_s) const;

  // Whether the own thread wakes for what arrives. REQUIRES of mute and unmute: the loop is the caller's.
  void mute();
  void unmute();
  // Ends a postponement. Needs no loop.
  void hasten() {
    if (postponed_) unmute();
  }

  // Whether all is answered, and nothing failed; and of each frame the answer, or the request that its session has now.
  using Outcome = std::pair<bool, py::list>;

  // None: it is not the time, or not the kind of arrays, for this; nothing was done.
  std::optional<Outcome> call(const Sender& sender, const FramePlan& plan,
                              const py::sequence& arrays, const Terms& terms, py::list& futures);
  // Sends, and leaves the requests to their sessions. None: nothing was done. Else whether all is sent: what is not
  // waits for whoever drives the connections. `under_way`: a set, to which `whole` is added.
  std::optional<bool> start(const Sender& sender, const FramePlan& plan, const py::sequence& arrays,
                            const Terms& terms, py::list& futures, std::optional<py::set> under_way,
                            const py::object& whole);

 private:
  class Hold;
  class Visit;

  bool nobody_waits() const;
  void listen(bool listens);
  void postpone();
  py::list leave_to_loop(Attempt& attempt, py::list& futures) const;

  LoopParts loop_;
  py::object acquire_;
  py::object release_;
  py::object wanted_;
  py::object running_loop_;
  py::object set_running_loop_;
  bool busy_ = false;
  Descriptor timer_;  // wakes the own thread
  bool muted_ = false;
  bool postponed_ = false;  // muted, until the timer rings
};

// The loop, taken; given back at the end. Meanwhile the own thread sleeps on, whatever arrives.
class FastLane::Hold {
 public:
  explicit Hold(FastLane& lane) : lane_(lane) {
    if (called(PyObject_CallOneArg(lane_.acquire_.ptr(), Py_False)).ptr() != Py_True) return;
    lane_.busy_ = held_ = true;
    lane_.mute();
  }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;
  ~Hold() { release(); }

  explicit operator bool() const { return held_; }
  void release() {
    if (!std::exchange(held_, false)) return;
    lane_.unmute();
    lane_.busy_ = false;
    called(PyObject_CallNoArgs(lane_.release_.ptr()));
  }

 private:
  FastLane& lane_;
  bool held_ = false;
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

bool FastLane::nobody_waits() const {
  return loop_.callers.empty() && py::len(loop_.ready) == 0 &&
         called(PyObject_CallNoArgs(wanted_.ptr())).ptr() == Py_False;
}

void FastLane::ask(double timeout_s) const {
  const auto timeout = as_nanoseconds(timeout_s);
  const py::gil_scoped_release no_gil;
  pollfd sockets{loop_.sockets, POLLIN, 0};
  poll_busily({&sockets, 1}, timeout, timeout);
}

void FastLane::mute() {
  if (!muted_) listen(false);
  postponed_ = false;
}

void FastLane::unmute() {
  if (muted_) listen(true);
  postponed_ = false;
}

void FastLane::listen(bool listens) {
  muted_ = !listens;
  epoll_event event{};
  if (listens) event.events = EPOLLIN;
  event.data.fd = loop_.sockets;
  epoll_ctl(loop_.idle, EPOLL_CTL_MOD, loop_.sockets, &event);
}

// The own thread looks after what comes a little later, unless somebody waits for it before: woken by each
// answer, it would fight for the GIL with a thread that starts one call after the other.
void FastLane::postpone() {
  if (muted_) return;
  listen(false);
  postponed_ = true;
  const itimerspec once{.it_interval = {},
                        .it_value = {.tv_sec = 0, .tv_nsec = kPostponed.count()}};
  timerfd_settime(timer_.get(), 0, &once, nullptr);
}

// Makes Python objects, so that a garbage collection may strike: its finalizers must not wait for the loop,
// and see by the running one that they are in the middle of its work.
py::list FastLane::leave_to_loop(Attempt& attempt, py::list& futures) const {
  const py::object outer = running_loop_();
  set_running_loop_(loop_.loop);
  py::list results = attempt.hand_over(futures, now_s());
  set_running_loop_(outer);
  return results;
}

// Nobody waits for them any more.
[[noreturn]] void cancel_and_throw(const py::list& results) {
  const py::error_already_set error;
  for (const py::handle one : results) {
    if (!py::isinstance<Frame>(one)) one.attr("future").attr("cancel")();
  }
  throw error;
}

// Until all is answered no Python object is made while the loop is held, and so no line of Python can run here.
std::optional<FastLane::Outcome> FastLane::call(const Sender& sender, const FramePlan& plan,
                                                const py::sequence& arrays, const Terms& terms,
                                                py::list& futures) {
  std::optional<std::vector<Segments>> memories =
      plan.map().of_arrays(arrays, /*writable=*/terms.reads());
  if (!memories) return std::nullopt;
  Attempt attempt(plan, std::move(*memories), sender, terms);
  Hold hold(*this);
  const bool possible =
      hold && nobody_waits() && attempt.possible() && py::len(futures) >= plan.num_frames();
  if (!possible) return std::nullopt;
  const bool all_answered = attempt.run(loop_.bell, loop_.busy);
  attempt.note_answers(now_s());
  if (all_answered) {
    hold.release();
    return Outcome{attempt.succeeded(), attempt.answers()};
  }
  py::list results = leave_to_loop(attempt, futures);
  hold.release();  // a signal's handler may want the loop
  if (PyErr_CheckSignals() != 0) cancel_and_throw(results);
  return Outcome{false, std::move(results)};
}

std::optional<bool> FastLane::start(const Sender& sender, const FramePlan& plan,
                                    const py::sequence& arrays, const Terms& terms,
                                    py::list& futures, std::optional<py::set> under_way,
                                    const py::object& whole) {
  std::optional<std::vector<Segments>> memories =
      plan.map().of_arrays(arrays, /*writable=*/terms.reads());
  if (!memories || running_loop_().is(loop_.loop)) return std::nullopt;
  Attempt attempt(plan, std::move(*memories), sender, terms);
  const Visit visit(*this);
  // What was started before has to go before.
  const bool possible =
      py::len(loop_.ready) == 0 && attempt.sendable() && py::len(futures) >= plan.num_frames();
  if (!possible) return std::nullopt;
  const bool small = attempt.is_small();
  const bool sent = attempt.send();
  leave_to_loop(attempt, futures);
  if (small) postpone();
  if (under_way) under_way->add(whole);
  return sent;
}

}  // namespace

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
      .def("heard", &RequestLine::heard, "version"_a, "scaled"_a, "now"_a)
      .def("connect", &RequestLine::connect, "fd"_a, "decoder"_a, "unsent"_a)
      .def("disconnect", &RequestLine::disconnect);
  py::class_<FramePlan>(m, "FramePlan", py::is_final())
      .def(py::init<const FrameMap&, std::vector<size_t>, std::vector<py::object>>(), "arrays"_a,
           "shards"_a, "tables"_a);
  py::class_<Sender>(m, "Sender", py::is_final())
      .def(py::init([](py::list lines, py::object request, uint32_t rank, uint32_t incarnation,
                       bool checksum) {
             auto pointers = lines.cast<std::vector<RequestLine*>>();
             return Sender{std::move(pointers), std::move(lines), std::move(request), rank,
                           incarnation,         checksum};
           }),
           "lines"_a, py::kw_only(), "request"_a, "rank"_a, "incarnation"_a, "checksum"_a)
      .def("has_told", &Sender::has_told, "decision"_a);
  py::class_<Terms>(m, "Terms", py::is_final())
      .def(py::init([](uint8_t op, double timeout_s, uint64_t round, py::object body,
                       std::vector<std::string> bodies, uint64_t told, uint64_t scaled) {
             return Terms{Op{op}, round, timeout_s, std::move(body), std::move(bodies),
                          told,   scaled};
           }),
           "op"_a, py::kw_only(), "timeout_s"_a, "round"_a = 0, "body"_a = py::none(),
           "bodies"_a = std::vector<std::string>{}, "told"_a = 0, "scaled"_a = 0)
      .def_readonly("timeout_s", &Terms::timeout_s);
  py::class_<FastLane>(m, "FastLane", py::is_final())
      .def(py::init([](py::object loop, py::object mutex, py::object queue, py::list callers,
                       py::object ready, int bell, int sockets, int idle, double busy_s) {
             return FastLane({std::move(loop), std::move(mutex), std::move(queue),
                              std::move(callers), std::move(ready), bell, sockets, idle,
                              as_nanoseconds(busy_s)});
           }),
           py::kw_only(), "loop"_a, "mutex"_a, "queue"_a, "callers"_a, "ready"_a, "bell"_a,
           "sockets"_a, "idle"_a, "busy_s"_a = 0.0)
      .def_property_readonly("busy", &FastLane::busy)
      .def("ask", &FastLane::ask, "timeout_s"_a)
      .def("mute", &FastLane::mute)
      .def("unmute", &FastLane::unmute)
      .def("hasten", &FastLane::hasten)
      .def("call", &FastLane::call, "sender"_a, "plan"_a, "arrays"_a, "terms"_a, "futures"_a)
      .def("start", &FastLane::start, "sender"_a, "plan"_a, "arrays"_a, "terms"_a, "futures"_a,
           "under_way"_a, "whole"_a);
}

}  // namespace psstore::bindings
