// CarriedDecisions, ClientRequest and ClientSession for Python.
#include "bindings/session.h"

#include <pybind11/stl.h>

#include <utility>

#include "local/local_link.h"

namespace psstore::bindings {
namespace {

// Of one connection, before others have their turn: 4 MiB at most, as slices have 256 KiB.
constexpr int kReadsPerTurn = 16;

// Whoever made one request and waits for it with a future.
class FutureAsker final : public PyAsker {
 public:
  FutureAsker(PySession& session, const PySession::Asked& asked)
      : session_(session),
        future_(asked.future),
        table_(asked.table),
        message_(asked.message),
        memory_(asked.memory) {}

  const py::object& future() const { return future_; }
  const py::object& memory() const { return memory_; }

  bool forgotten() const override {
    const py::gil_scoped_acquire gil;
    return future_.attr("done")().cast<bool>();
  }

  bool cancelled() const override { return future_.attr("cancelled")().cast<bool>(); }

  void answered(size_t part, std::shared_ptr<Frame> answer) override {
    try {
      finish(result_of(answer));
    } catch (py::error_already_set& error) {
      failed(part, error.value());
      session_.misunderstand(error.value());
    }
  }

  void failed(size_t /*part*/, const py::object& error) override {
    if (!forgotten()) future_.attr("set_exception")(error);
  }

  void finish(const py::object& result) {
    if (!forgotten()) future_.attr("set_result")(result);
  }

  std::string body(double waited_s) const override {
    if (message_.is_none()) return {};
    const py::gil_scoped_acquire gil;
    return session_.encode()(message_, waited_s).cast<std::string>();
  }

  LaidOut lay_out(uint64_t number) override {
    const py::gil_scoped_acquire gil;
    const py::object told = memory_.attr("told")(session_.near, table_, number);
    if (!told.is_none()) {
      const auto entries = told.cast<const SliceTable&>().entries();
      return {.table = {entries.begin(), entries.end()}, .memory = {}, .owner = nullptr};
    }
    const auto copy = in_main_memory();
    return {.table = {}, .memory = copy->cast<const Segments&>().ranges(), .owner = copy};
  }

  void keep() override {
    const py::gil_scoped_acquire gil;
    kept_ = in_main_memory();
  }

 private:
  // What waits to be sent lets go of it with the GIL held.
  std::shared_ptr<py::object> in_main_memory() const {
    return kept_ != nullptr ? kept_
                            : std::make_shared<py::object>(memory_.attr("in_main_memory")());
  }

  py::object result_of(const std::shared_ptr<Frame>& answer) const {
    const Header& header = answer->header;
    if (!is_data_reply(header.op)) {
      return session_.understand()(static_cast<int>(header.op), py::bytes(answer->body));
    }
    const py::object table = py::cast(answer).attr("table");
    return session_.answer()(table, header.sequence, py::none(), header.round != 0);
  }

  PySession& session_;
  const py::object future_;
  const py::object table_;
  const py::object message_;
  const py::object memory_;
  // What was in `memory_`, once it is its owner's again.
  std::shared_ptr<py::object> kept_ = nullptr;
};

const FutureAsker* one_future(const Request& request) {
  return dynamic_cast<const FutureAsker*>(request.asker.get());
}

std::vector<uint64_t> numbers_of(const ClientSession& session, bool reads_only) {
  std::vector<uint64_t> numbers;
  for (const auto& request : session.requests()) {
    if (!reads_only || request->reads()) numbers.push_back(request->number);
  }
  return numbers;
}

std::vector<uint64_t> expired(const ClientSession& session, double now_s) {
  std::vector<uint64_t> numbers;
  for (const auto& request : session.requests()) {
    if (request->deadline_s <= now_s) numbers.push_back(request->number);
  }
  return numbers;
}

std::optional<double> next_deadline(const ClientSession& session) {
  std::optional<double> next;
  for (const auto& request : session.requests()) {
    if (!next || request->deadline_s < *next) next = request->deadline_s;
  }
  return next;
}

std::vector<std::byte> copy_of(const py::bytes& given) {
  const auto bytes = std::as_bytes(std::span(std::string_view(given)));
  return {bytes.begin(), bytes.end()};
}

}  // namespace

CarriedDecisions::News PyDecisions::since(uint64_t told) {
  const py::gil_scoped_acquire gil;
  const py::object news = news_();
  if (news.is_none()) return {};
  const auto said = news(told).cast<py::tuple>();
  return {.newest = said[0].cast<uint64_t>(),
          .decisions = said[1].cast<std::string>(),
          .scaled = said[2].cast<uint64_t>(),
          .factor = said[3].cast<std::optional<double>>()};
}

// ---- requests ---------------------------------------------------------------------------------------

void PySession::ask(const Asked& asked) {
  auto request = std::make_shared<Request>();
  request->op = Op{asked.op};
  request->round = asked.round;
  request->sequence = asked.sequence;
  request->began_s = asked.now_s;
  request->deadline_s = asked.now_s + asked.timeout_s;
  request->may_land = asked.may_land;
  if (!asked.carry.is_none()) {
    request->carries = true;
    std::tie(request->at_least, request->wait_s) = asked.carry.cast<std::pair<uint64_t, double>>();
    if (!asked.message.is_none()) request->ids = asked.message.cast<std::string>();
  }
  if (!asked.table.is_none()) request->table = asked.table.cast<const SliceTable&>().entries();
  if (py::isinstance<Segments>(asked.memory)) {
    const auto& memory = asked.memory.cast<const Segments&>();
    request->memory = memory.ranges();
    request->memory_bytes = memory.num_bytes();
  } else if (!asked.memory.is_none()) {
    request->kind = request->reads() ? Request::Kind::kByHand : Request::Kind::kFromDevice;
    if (!request->reads()) request->memory_bytes = asked.memory.attr("nbytes").cast<size_t>();
  }
  request->asker = std::make_shared<FutureAsker>(*this, asked);
  if (request->memory_bytes < kReleaseGilBytes) {
    session.ask(std::move(request), asked.now_s);
  } else {
    const std::shared_ptr<Request> kept = request;  // if it throws
    const py::gil_scoped_release no_gil;
    session.ask(std::move(request), asked.now_s);
  }
}

bool PySession::finish(uint64_t number, const py::object& result) {
  const std::shared_ptr<Request> request = session.take(number);
  if (request == nullptr) return false;
  if (auto* const asker = dynamic_cast<FutureAsker*>(request->asker.get())) asker->finish(result);
  return true;
}

bool PySession::fail(uint64_t number, const py::object& error) {
  const std::shared_ptr<Request> request = session.take(number);
  if (request == nullptr) return false;
  dynamic_cast<PyAsker&>(*request->asker).failed(request->part, error);
  return true;
}

// ---- bytes ------------------------------------------------------------------------------------------

template <typename Take>
auto PySession::telling(Take take) {
  try {
    auto taken = take();
    session.tell_answered();
    if (!misunderstood_.is_none()) {
      PyErr_SetObject(py::type::handle_of(misunderstood_).ptr(), misunderstood_.ptr());
      throw py::error_already_set();
    }
    session.tidy();
    return taken;
  } catch (const Error&) {
    session.tell_answered();
    throw;
  }
}

bool PySession::receive(double now_s) {
  session.last_heard_s = now_s;
  const auto received = telling([this] {
    const py::gil_scoped_release no_gil;
    return session.receive(kReadsPerTurn, /*may_sleep=*/false);
  });
  return received != ClientSession::Received::kLost;
}

void PySession::feed(const py::object& data) {
  telling([&] {
    const PyBytesRange range(data);
    const py::gil_scoped_release no_gil;
    session.feed(range.bytes());
    return true;
  });
}

std::shared_ptr<Frame> PySession::next_frame() {
  std::shared_ptr<Frame> frame = telling([this] { return session.next_frame(); });
  if (frame != nullptr && frame->complete) destination_ = py::none();
  return frame;
}

void PySession::accept(const py::object& destination) {
  const auto& segments = destination.cast<const Segments&>();
  if (!segments.writable()) {
    throw Error(ErrorCode::BAD_ARGUMENT, "Segments to receive into need writable=True");
  }
  session.decoder().accept(segments.ranges());
  destination_ = destination;
}

void PySession::disconnected() {
  misunderstood_ = py::none();
  session.disconnected();
  session.tidy();
  destination_ = py::none();
  near = py::none();
}

bool PySession::send() {
  if (session.outgoing().num_bytes() < kReleaseGilBytes) {
    session.send();
  } else {
    const py::gil_scoped_release no_gil;
    session.send();
  }
  session.tidy();
  return !session.awaits_room();
}

py::list PySession::take_output() {
  auto* const taken = new Outgoing(std::move(session.outgoing()));
  session.outgoing() = {};
  const py::capsule owner(taken, [](void* given) { delete static_cast<Outgoing*>(given); });
  py::list frames;
  for (const auto pieces : taken->frames()) {
    Segments frame(/*writable=*/false);
    for (const iovec& piece : pieces) {
      frame.add({static_cast<std::byte*>(piece.iov_base), piece.iov_len});
    }
    frames.append(frame.pieces(owner));
  }
  return frames;
}

// ---- Python -----------------------------------------------------------------------------------------

void bind_session(py::module_& m) {
  using namespace py::literals;
  py::class_<PyDecisions, std::shared_ptr<PyDecisions>>(m, "CarriedDecisions", py::is_final())
      .def(py::init<py::object>(), "news"_a)
      .def_readwrite("last", &PyDecisions::last)
      .def_readwrite("is_scaled", &PyDecisions::is_scaled);

  py::class_<Request, std::shared_ptr<Request>>(m, "ClientRequest", py::is_final())
      .def_readonly("number", &Request::number)
      .def_property_readonly("op", [](const Request& self) { return static_cast<int>(self.op); })
      .def_readonly("sequence", &Request::sequence)
      .def_readonly("began", &Request::began_s)
      .def_readonly("deadline", &Request::deadline_s)
      .def_readonly("scaled", &Request::scaled)
      .def_property_readonly("forgotten",
                             [](const Request& self) { return self.asker->forgotten(); })
      .def_property_readonly("memory", [](const Request& self) -> py::object {
        const FutureAsker* const asker = one_future(self);
        return asker == nullptr ? py::none() : asker->memory();
      });

  py::class_<PySession>(m, "ClientSession", py::is_final())
      .def(py::init<std::shared_ptr<PyDecisions>, py::object, py::object, py::object>(),
           "decisions"_a, py::kw_only(), "answer"_a, "understand"_a, "encode"_a)
      .def(
          "speaks_as",
          [](PySession& self, uint32_t rank, uint32_t incarnation, bool checksum,
             bool keeps_releases) {
            self.session.speaker = {rank, incarnation, checksum, keeps_releases};
          },
          py::kw_only(), "rank"_a, "incarnation"_a, "checksum"_a, "keeps_releases"_a)
      .def_property_readonly("version", [](const PySession& self) { return self.session.version; })
      .def_property_readonly("scaled", [](const PySession& self) { return self.session.scaled; })
      .def_property(
          "last_heard", [](const PySession& self) { return self.session.last_heard_s; },
          [](PySession& self, double at_s) { self.session.last_heard_s = at_s; })
      .def_property(
          "looks_at", [](const PySession& self) { return self.session.looks_at; },
          [](PySession& self, double at_s) { self.session.looks_at = at_s; })
      .def_readwrite("near", &PySession::near)
      // the connection
      .def("connected", [](PySession& self) { self.session.connected(); })
      .def(
          "open",
          [](PySession& self, int fd, std::shared_ptr<TlsSession> tls) {
            self.session.open(fd, std::move(tls));
          },
          "fd"_a, "tls"_a = nullptr)
      .def(
          "open_local",
          [](PySession& self, std::shared_ptr<LocalLink> link) {
            self.session.open(std::move(link));
          },
          "link"_a)
      .def(
          "welcomed",
          [](PySession& self, uint64_t version, uint64_t last_sequence, double now_s) {
            const py::gil_scoped_release no_gil;
            self.session.welcomed(version, last_sequence, now_s);
          },
          "version"_a, "last_sequence"_a, "now"_a)
      .def("disconnected", &PySession::disconnected)
      .def(
          "share",
          [](PySession& self, std::shared_ptr<ClientMemory> memory, size_t from_bytes) {
            self.session.share(std::move(memory), from_bytes);
          },
          "memory"_a, "from_bytes"_a)
      .def_property_readonly("memory", [](const PySession& self) { return self.session.memory(); })
      // requests
      .def(
          "ask",
          [](PySession& self, uint8_t op, py::object future, double now_s, double timeout_s,
             py::object table, py::object carry, py::object message, py::object memory,
             bool may_land, uint64_t round, uint64_t sequence) {
            self.ask({op, std::move(future), now_s, timeout_s, std::move(table), std::move(carry),
                      std::move(message), std::move(memory), may_land, round, sequence});
          },
          "op"_a, "future"_a, "now"_a, "timeout_s"_a, "table"_a = py::none(),
          "carry"_a = py::none(), "message"_a = py::none(), "memory"_a = py::none(),
          "may_land"_a = false, "round"_a = 0, "sequence"_a = 0)
      .def(
          "request",
          [](const PySession& self, uint64_t number) -> std::shared_ptr<Request> {
            return self.session.request(number);
          },
          "number"_a)
      .def_property_readonly("next_request",
                             [](const PySession& self) { return self.session.next_request; })
      .def_property_readonly("num_requests",
                             [](const PySession& self) { return self.session.requests().size(); })
      .def(
          "numbers",
          [](const PySession& self, bool reads_only) {
            return numbers_of(self.session, reads_only);
          },
          py::kw_only(), "reads_only"_a = false)
      .def(
          "expired",
          [](const PySession& self, double now_s) { return expired(self.session, now_s); }, "now"_a)
      .def("next_deadline", [](const PySession& self) { return next_deadline(self.session); })
      .def("finish", &PySession::finish, "number"_a, "result"_a)
      .def("fail", &PySession::fail, "number"_a, "error"_a)
      .def("keep_cancelled", [](PySession& self) { self.session.keep_cancelled(); })
      .def(
          "heard",
          [](PySession& self, uint64_t version, uint64_t scaled) {
            self.session.heard(version, scaled);
          },
          "version"_a, "scaled"_a)
      .def(
          "say", [](PySession& self, const py::bytes& frame) { self.session.say(copy_of(frame)); },
          "frame"_a)
      // bytes
      .def("send", &PySession::send)
      .def("receive", &PySession::receive, "now"_a)
      .def("feed", &PySession::feed, "data"_a)
      .def("next_frame", &PySession::next_frame)
      .def("accept", &PySession::accept, "destination"_a)
      .def("discard", [](PySession& self) { self.session.decoder().discard(); })
      .def("take_output", &PySession::take_output)
      .def_property_readonly(
          "holds_bytes",
          [](const PySession& self) { return self.session.link().stream().holds_bytes(); })
      .def_property_readonly("is_hung_up",
                             [](const PySession& self) { return self.session.link().is_hung_up(); })
      .def_property_readonly("has_output",
                             [](const PySession& self) { return !self.session.outgoing().done(); })
      // releases
      .def(
          "add_release",
          [](PySession& self, uint64_t request) { self.session.add_release(request); }, "request"_a)
      .def_property_readonly("num_releases",
                             [](const PySession& self) { return self.session.num_releases(); })
      .def("release", [](PySession& self) { self.session.release(); })
      .def("release_if_due", [](PySession& self) { return self.session.release_if_due(); })
      .def_property(
          "release_is_due", [](const PySession& self) { return self.session.release_is_due; },
          [](PySession& self, bool is_due) { self.session.release_is_due = is_due; });
}

}  // namespace psstore::bindings
