// CallDriver for Python.
#include "bindings/call_driver.h"

#include <pybind11/stl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "client/drive.h"
#include "core/busy_poll.h"
#include "core/clock.h"

namespace psstore::bindings {
namespace {

// How long the answers to small calls that were started wait, if nobody waits for them.
constexpr std::chrono::nanoseconds kArmedLater = std::chrono::milliseconds{1};

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

// What waits on a session to go out together, at most: it goes out with the GIL held.
constexpr size_t kMaxCorkedBytes = kReleaseGilBytes;

}  // namespace

CallDriver::CallDriver(LoopParts parts)
    : loop_(std::move(parts)),
      acquire_(loop_.mutex.attr("acquire")),
      release_(loop_.mutex.attr("release")),
      wanted_(loop_.queue.attr("locked")),
      running_loop_(py::module_::import("_asyncio").attr("_get_running_loop")),
      set_running_loop_(py::module_::import("_asyncio").attr("_set_running_loop")),
      timer_(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)) {
  epoll_event event{.events = EPOLLIN | EPOLLET, .data = {.fd = timer_.get()}};
  if (timer_.get() < 0 || epoll_ctl(loop_.idle, EPOLL_CTL_ADD, timer_.get(), &event) != 0) {
    PyErr_SetFromErrno(PyExc_OSError);
    throw py::error_already_set();
  }
}

// The loop, taken if nobody wants it; given back at the end. Meanwhile the own thread sleeps on, whatever arrives, and
// afterwards for a while, if the call was answered and nothing else is under way.
class CallDriver::Hold {
 public:
  explicit Hold(CallDriver& driver) : driver_(driver) {
    if (called(PyObject_CallOneArg(driver_.acquire_.ptr(), Py_False)).ptr() != Py_True) return;
    held_ = true;
    if (!driver_.nobody_waits()) {
      let_go();
      return;
    }
    driver_.busy_ = true;
    driver_.disarm();
  }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;
  ~Hold() { release(); }

  explicit operator bool() const { return held_; }
  // All is quiet: it may sleep on for a while.
  void rest() { rests_ = true; }
  void release() {
    if (!held_) return;
    if (rests_ && driver_.nobody_waits()) {
      driver_.arm_later(kRest);
    } else {
      driver_.arm();
    }
    driver_.busy_ = false;
    let_go();
  }

 private:
  void let_go() {
    held_ = false;
    called(PyObject_CallNoArgs(driver_.release_.ptr()));
  }

  CallDriver& driver_;
  bool held_ = false;
  bool rests_ = false;
};

// The same for as long as sending takes: whoever has the loop is waited for, and who listens goes on listening.
class CallDriver::Visit {
 public:
  explicit Visit(const CallDriver& driver) : driver_(driver) {
    if (called(PyObject_CallOneArg(driver_.acquire_.ptr(), Py_False)).ptr() == Py_True) return;
    if (driver_.busy_) eventfd_write(driver_.loop_.wakeup_fd, 1);  // it lets go of the loop then
    called(PyObject_CallNoArgs(driver_.acquire_.ptr()));
  }
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;
  ~Visit() { called(PyObject_CallNoArgs(driver_.release_.ptr())); }

 private:
  const CallDriver& driver_;
};

// Around what makes Python objects with the loop held, so that a garbage collection may strike: its finalizers
// must not wait for the loop, and see by the running one that they are in the middle of its work.
class CallDriver::Inside {
 public:
  explicit Inside(const CallDriver& driver) : driver_(driver), outer_(driver.running_loop_()) {
    driver_.set_running_loop_(driver_.loop_.loop);
  }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
  ~Inside() { driver_.set_running_loop_(outer_); }

 private:
  const CallDriver& driver_;
  const py::object outer_;
};

bool CallDriver::nothing_is_due() const {
  return py::len(loop_.ready) == 0 && called(PyObject_CallNoArgs(wanted_.ptr())).ptr() == Py_False;
}

void CallDriver::ask(double timeout_s) const {
  const auto timeout = as_nanoseconds(timeout_s);
  const py::gil_scoped_release no_gil;
  pollfd sockets{loop_.sockets, POLLIN, 0};
  poll_busily({&sockets, 1}, timeout, timeout);
}

void CallDriver::set_armed(bool arms) {
  armed_ = arms;
  epoll_event event{};
  if (arms) event.events = EPOLLIN;
  event.data.fd = loop_.sockets;
  epoll_ctl(loop_.idle, EPOLL_CTL_MOD, loop_.sockets, &event);
}

void CallDriver::uncork() {
  if (loop_.corked.empty()) return;
  const Inside inside(*this);
  for (const py::handle one : loop_.corked) send(one.cast<PySession&>().session);
  loop_.corked.attr("clear")();
}

// As the loop does it itself, so that no line of Python runs in between: an exception there would have it never sent.
void CallDriver::send(ClientSession& session) const {
  if (!session.link().is_open()) return;
  if (session.outgoing().num_bytes() < kReleaseGilBytes) {
    session.send();
  } else {
    const py::gil_scoped_release no_gil;
    session.send();
  }
  session.tidy();
  if (!session.awaits_room() || session.link().is_local()) return;
  epoll_event event{.events = EPOLLIN | EPOLLOUT, .data = {.fd = session.link().fd()}};
  epoll_ctl(loop_.sockets, EPOLL_CTL_MOD, session.link().fd(), &event);
}

// The own thread looks after what comes a little later, unless somebody waits for it before: woken by each
// answer, it would fight for the GIL with a thread that makes one call after the other.
void CallDriver::arm_later(std::chrono::nanoseconds time) {
  if (armed_) set_armed(false);
  armed_later_ = true;
  if (rings_within_ <= time) return;
  rings_within_ = time;
  const itimerspec once{.it_interval = {}, .it_value = {.tv_sec = 0, .tv_nsec = time.count()}};
  timerfd_settime(timer_.get(), 0, &once, nullptr);
}

// What is new to its shards Python says.
void CallDriver::make(Call& call) const {
  std::optional<Inside> inside;
  if (call.has_news()) inside.emplace(*this);
  call.ask(monotonic_s());
}

// Until all is answered no Python object is made while the loop is held, but where there is news, and so no line of Python
// can run here.
CallDriver::Outcome CallDriver::call(Call& call) {
  Hold hold(*this);
  const auto sessions = call.sessions();
  if (!hold || !loop_.corked.empty() || !std::ranges::all_of(sessions, &ClientSession::is_quiet)) {
    return Outcome::kNotNow;
  }
  make(call);
  {
    const py::gil_scoped_release no_gil;
    drive(sessions, loop_.wakeup_fd, loop_.busy);
  }
  const double now = monotonic_s();
  for (ClientSession* const session : sessions) {
    if (session->tell_answered()) session->last_heard_s = now;
    session->tidy();
  }
  if (call.over()) {
    tell_releases(call);
    if (call.leaves_quiet()) hold.rest();
    return Outcome::kAnswered;
  }
  for (ClientSession* const session : sessions) send(*session);
  hold.release();  // a signal's handler may want the loop
  if (PyErr_CheckSignals() != 0) {
    const py::error_already_set interruption;
    forget(call);
    throw interruption;
  }
  return Outcome::kLeft;
}

void CallDriver::forget(Call& call) const {
  const Visit visit(*this);
  const Inside inside(*this);
  call.forget();
}

std::optional<bool> CallDriver::await(PySession& asked) {
  ClientSession* const session = &asked.session;
  if (py::len(loop_.callers) != 1 || !nothing_is_due() || !session->asks_once()) return {};
  busy_ = true;
  {
    const py::gil_scoped_release no_gil;
    drive({&session, 1}, loop_.wakeup_fd, loop_.busy);
  }
  busy_ = false;
  if (session->tell_answered()) session->last_heard_s = monotonic_s();
  send(*session);
  return asked.is_settled();
}

std::optional<bool> CallDriver::start(Call& call) {
  if (running_loop_().is(loop_.loop)) return std::nullopt;
  const Visit visit(*this);
  const auto sessions = call.sessions();
  // What was started before has to go before.
  if (has_ready() || !std::ranges::all_of(sessions, &ClientSession::is_up)) return std::nullopt;
  const bool small = call.is_small();
  const bool waits = can_wait(call);
  if (!waits) uncork();
  const Inside inside(*this);
  call.ask(monotonic_s());
  for (size_t i = 0; i < sessions.size(); ++i) {
    if (!waits) {
      send(*sessions[i]);
    } else if (const py::object session = call.object_of(i); !loop_.corked.contains(session)) {
      loop_.corked.append(session);
    }
  }
  const bool led = !armed_ && !armed_later_;
  if (!led && small) arm_later(kArmedLater);
  if (!led && !small) arm();
  return std::ranges::all_of(sessions, [&](const ClientSession* session) {
    return session->looks_at <= call.deadline_s() && !session->link().wants_turn();
  });
}

// The answer to a write is near on each of its sessions, and little waits there.
bool CallDriver::can_wait(const Call& call) const {
  return call.is_small() && std::ranges::all_of(call.sessions(), [](const ClientSession* session) {
           return session->answer_is_near() && session->outgoing().num_bytes() < kMaxCorkedBytes;
         });
}

// What was read in shared memory, where that is not to wait.
void CallDriver::tell_releases(const Call& call) const {
  for (ClientSession* const session : call.sessions()) {
    if (session->release_if_due()) send(*session);
  }
}

void bind_call_driver(py::module_& m) {
  using namespace py::literals;
  py::class_<CallDriver>(m, "CallDriver", py::is_final())
      .def(py::init([](py::object loop, py::object mutex, py::object queue, py::list callers,
                       py::object ready, py::list corked, int wakeup_fd, int sockets, int idle,
                       double busy_s) {
             return CallDriver({std::move(loop), std::move(mutex), std::move(queue),
                                std::move(callers), std::move(ready), std::move(corked), wakeup_fd,
                                sockets, idle, as_nanoseconds(busy_s)});
           }),
           py::kw_only(), "loop"_a, "mutex"_a, "queue"_a, "callers"_a, "ready"_a, "corked"_a,
           "wakeup_fd"_a, "sockets"_a, "idle"_a, "busy_s"_a = 0.0)
      .def_property_readonly("busy", &CallDriver::busy)
      .def("ask", &CallDriver::ask, "timeout_s"_a)
      .def("await_answer", &CallDriver::await, "session"_a)
      .def("disarm", &CallDriver::disarm)
      .def("arm", &CallDriver::arm)
      .def("woken", &CallDriver::woken)
      .def("uncork", &CallDriver::uncork)
      .def("arm_now", &CallDriver::arm_now);
}

}  // namespace psstore::bindings
