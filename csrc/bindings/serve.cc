// Desk, Port and Pump for Python: what they can answer never becomes an object of Python's.
#include <pybind11/stl.h>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "bindings/decoder.h"
#include "serve/port.h"
#include "serve/pump.h"

namespace psstore::bindings {
namespace {

py::object part_of(Replies::Part part) {
  if (auto* piece = std::get_if<Piece>(&part)) return view_of(std::move(*piece));
  return py::bytes(std::get<std::string>(part));
}

py::list parts_of(Replies& replies) {
  py::list parts;
  for (Replies::Part& part : replies.take()) parts.append(part_of(std::move(part)));
  return parts;
}

double monotonic_s() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

class PyPort : public PyDecoder {
 public:
  PyPort(Desk& desk, uint32_t max_body_bytes, uint64_t max_payload_bytes)
      : PyDecoder(max_body_bytes, max_payload_bytes), port_(decoder(), desk) {}

  void open(uint64_t connection, std::string client, bool wants_checksum) {
    port_.open({connection, std::move(client), wants_checksum});
  }
  void attach(uint32_t rank, uint32_t incarnation) { port_.attach({rank, incarnation}); }

  // Without the GIL: it is long if values are.
  std::shared_ptr<Frame> next_frame(std::optional<double> now_s) {
    return fetch([&] {
      const py::gil_scoped_release no_gil;
      return port_.next_frame(now_s ? *now_s : monotonic_s());
    });
  }

  py::list take_replies() { return parts_of(port_.replies()); }

  bool has_asked() const { return port_.has_asked(); }

  Port& port() { return port_; }

 private:
  Port port_;
};

// Python's memory while a connection still has to send it.
class LentBytes : public BufferOwner {
 public:
  static Piece lend(py::handle object) {
    auto owner = std::make_shared<LentBytes>(object);
    const PyBytesRange& range = owner->range_;
    const size_t size = range.size();
    auto* const buffer = new Buffer(range.data(), size, size);
    return {BufferRef::adopt(buffer, std::move(owner)), size};
  }

  explicit LentBytes(py::handle object) : range_(object) {}
  LentBytes(const LentBytes&) = delete;
  LentBytes& operator=(const LentBytes&) = delete;
  // The last reference may go in a turn, which is without the GIL.
  ~LentBytes() override {
    const py::gil_scoped_acquire gil;
    const PyBytesRange released = std::move(range_);
  }

 private:
  void release(Buffer* buffer) noexcept override { delete buffer; }

  PyBytesRange range_;
};

class PyPump {
 public:
  PyPump(Desk& desk, int bell, double busy_s) : pump_(desk, bell, as_duration(busy_s)) {}

  int fileno() const { return pump_.fileno(); }
  void add(Pump::Id id, int socket, const py::object& port) {
    auto& py_port = port.cast<PyPort&>();
    pump_.add(id, Descriptor(socket), py_port.decoder(), py_port.port());
    ports_[id] = port;
  }
  void send(Pump::Id id, const py::sequence& pieces) {
    Replies::Parts lent;
    for (const py::handle piece : pieces) lent.emplace_back(LentBytes::lend(piece));
    pump_.send(id, std::move(lent));
  }
  void close(Pump::Id id) { pump_.close(id); }
  void drop(Pump::Id id) {
    pump_.drop(id);
    ports_.erase(id);
  }
  std::vector<Pump::Id> stalled(double limit_s) const {
    return pump_.stalled(as_duration(limit_s));
  }

  std::vector<Pump::Id> unread(double limit_s) { return pump_.unread(as_duration(limit_s)); }

  // (connection, what happened) or None.
  py::object turn(double linger_s) {
    std::optional<Pump::Event> event;
    {
      const py::gil_scoped_release no_gil;
      event = pump_.turn(as_duration(linger_s));
    }
    if (!event) return py::none();
    return py::make_tuple(
        event->id, std::visit([&](auto& what) { return tell(event->id, what); }, event->what));
  }

 private:
  static Pump::Clock::duration as_duration(double seconds) {
    return std::chrono::duration_cast<Pump::Clock::duration>(
        std::chrono::duration<double>(seconds));
  }

  py::object tell(Pump::Id id, std::shared_ptr<Frame>& frame) {
    ports_.at(id).cast<PyPort&>().took(*frame);
    return py::cast(std::move(frame));
  }
  py::object tell(Pump::Id, const std::exception_ptr& error) { return exception_of(error); }
  py::object tell(Pump::Id id, const Pump::Gone& gone) {
    ports_.erase(id);
    if (gone.error == 0) return py::none();
    return exception_of(std::make_exception_ptr(
        std::system_error(gone.error, std::generic_category(), "the connection broke")));
  }

  // Before the pump: it refers to them to its end.
  std::map<Pump::Id, py::object> ports_;
  Pump pump_;
};

// (replies for connections, reads that are left over).
py::tuple wake(Desk& desk, double now_s) {
  desk.wake(now_s);
  py::list deliveries;
  for (auto& [connection, replies] : desk.take_deliveries()) {
    deliveries.append(py::make_tuple(connection, parts_of(replies)));
  }
  py::list left_over;
  for (Parked& read : desk.take_left_over()) {
    left_over.append(py::make_tuple(read.connection, std::move(read.frame), read.until_s));
  }
  return py::make_tuple(std::move(deliveries), std::move(left_over));
}

}  // namespace

void bind_serve(py::module_& m) {
  using namespace py::literals;
  py::class_<Desk>(m, "Desk", py::is_final())
      .def("close", &Desk::close)
      .def(
          "remember",
          [](Desk& self, const py::bytes& body, double wait_s) { self.remember(body, wait_s); },
          "body"_a, py::kw_only(), "wait_s"_a)
      .def("newest_incarnation", &Desk::newest_incarnation, "rank"_a)
      .def(
          "park",
          [](Desk& self, uint64_t connection, std::shared_ptr<Frame> frame, bool wants_checksum,
             double until_s, std::optional<uint64_t> version, std::optional<Key> key) {
            if (version.has_value() == key.has_value()) {
              throw py::value_error("a read waits for a version or for a key");
            }
            const Wanted wanted = version ? Wanted(AtVersion{*version}) : Wanted(AtKey{*key});
            self.park({connection, wants_checksum, std::move(frame), until_s}, wanted);
          },
          "connection"_a, "frame"_a, py::kw_only(), "wants_checksum"_a, "until"_a,
          "version"_a = py::none(), "key"_a = py::none())
      .def("forget", &Desk::forget, "connection"_a)
      .def("reached_version", &Desk::reached_version)
      .def(
          "touched", [](Desk& self, const Frame& frame) { self.touched(frame.table.entries()); },
          "frame"_a)
      .def("touched_all", &Desk::touched_all)
      .def("wake", &wake, "now"_a)
      .def("next_wake", &Desk::next_wake);

  py::class_<PyPort, PyDecoder>(m, "Port", py::is_final())
      .def(py::init<Desk&, uint32_t, uint64_t>(), "desk"_a, py::kw_only(),
           "max_body_bytes"_a = kMaxBodyBytes, "max_payload_bytes"_a = kMaxPayloadBytes,
           py::keep_alive<1, 2>())
      .def("open", &PyPort::open, py::kw_only(), "connection"_a, "client"_a, "wants_checksum"_a)
      .def("attach", &PyPort::attach, "rank"_a, "incarnation"_a)
      .def("next_frame", &PyPort::next_frame, "now"_a = py::none())
      .def("take_replies", &PyPort::take_replies)
      .def_property_readonly("has_asked", &PyPort::has_asked);

  py::class_<PyPump>(m, "Pump", py::is_final())
      .def(py::init<Desk&, int, double>(), "desk"_a, py::kw_only(), "bell"_a, "busy_s"_a = 0.0,
           py::keep_alive<1, 2>())
      .def("fileno", &PyPump::fileno)
      .def("add", &PyPump::add, "connection"_a, py::kw_only(), "socket"_a, "port"_a)
      .def("send", &PyPump::send, "connection"_a, "pieces"_a)
      .def("close", &PyPump::close, "connection"_a)
      .def("drop", &PyPump::drop, "connection"_a)
      .def("stalled", &PyPump::stalled, "limit_s"_a)
      .def("unread", &PyPump::unread, "limit_s"_a)
      .def("turn", &PyPump::turn, "linger_s"_a);
}

}  // namespace psstore::bindings
