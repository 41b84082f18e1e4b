// DataService, ServerProtocol and Poller for Python: what they answer never becomes an object of Python's.
#include <pybind11/stl.h>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "bindings/decoder.h"
#include "core/breakable_rules.h"
#include "core/clock.h"
#include "local/local_link.h"
#include "server/poller.h"
#include "server/server_protocol.h"

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

// One that may be copied, and let go of, where the GIL is not held.
template <typename T>
std::shared_ptr<T> held_by_others(T object) {
  return {new T(std::move(object)), [](T* held) {
            const py::gil_scoped_acquire gil;
            delete held;
          }};
}

class PyServerProtocol : public PyDecoder {
 public:
  PyServerProtocol(DataService& service, uint64_t connection, uint32_t max_body_bytes,
                   uint64_t max_payload_bytes)
      : PyDecoder(max_body_bytes, max_payload_bytes),
        service_(service),
        protocol_(decoder(), service, connection) {}

  // Without the GIL: it is long if values are.
  std::shared_ptr<Frame> next_frame(std::optional<double> now_s) {
    return fetch([&] {
      const py::gil_scoped_release no_gil;
      return protocol_.next_frame(now_s ? *now_s : monotonic_s());
    });
  }

  void reply(const py::sequence& pieces);
  py::list take_replies() { return parts_of(protocol_.replies()); }

  ServerProtocol& protocol() { return protocol_; }
  ConnectedClient& client() { return protocol_.client(); }
  const DataService& service() const { return service_; }

 private:
  const DataService& service_;
  ServerProtocol protocol_;
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

Replies::Parts lend_all(const py::sequence& pieces) {
  Replies::Parts lent;
  for (const py::handle piece : pieces) lent.emplace_back(LentBytes::lend(piece));
  return lent;
}

void PyServerProtocol::reply(const py::sequence& pieces) {
  protocol_.replies().add(lend_all(pieces));
}

std::shared_ptr<LocalLink> make_local_link(py::object protocol) {
  auto& end = protocol.cast<PyServerProtocol&>();
  return std::make_shared<LocalLink>(end.decoder(), end.protocol(), end.service(),
                                     held_by_others(std::move(protocol)));
}

class PyPoller {
 public:
  PyPoller(DataService& service, int wakeup_fd, double busy_s)
      : poller_(service, wakeup_fd, as_duration(busy_s)) {}

  int fileno() const { return poller_.fileno(); }
  void add(Poller::Id id, int socket, const py::object& protocol, std::shared_ptr<TlsSession> tls) {
    auto& added = protocol.cast<PyServerProtocol&>();
    poller_.add(id, Descriptor(socket), std::move(tls), added.decoder(), added.protocol());
    protocols_[id] = protocol;
  }
  void send(Poller::Id id, const py::sequence& pieces) { poller_.send(id, lend_all(pieces)); }
  void deliver() { poller_.deliver(); }
  void close(Poller::Id id) { poller_.close(id); }
  void drop(Poller::Id id) {
    poller_.drop(id);
    protocols_.erase(id);
  }
  std::vector<Poller::Id> stalled(double limit_s) const {
    return poller_.stalled(as_duration(limit_s));
  }

  std::vector<Poller::Id> unread(double limit_s) { return poller_.unread(as_duration(limit_s)); }

  // (connection, what happened) or None.
  py::object turn(double linger_s) {
    std::optional<Poller::Event> event;
    {
      const py::gil_scoped_release no_gil;
      event = poller_.turn(as_duration(linger_s));
    }
    if (!event) return py::none();
    return py::make_tuple(
        event->id, std::visit([&](auto& what) { return tell(event->id, what); }, event->what));
  }

 private:
  static Poller::Clock::duration as_duration(double seconds) {
    return std::chrono::duration_cast<Poller::Clock::duration>(
        std::chrono::duration<double>(seconds));
  }

  py::object tell(Poller::Id, std::shared_ptr<Frame>& frame) { return py::cast(std::move(frame)); }
  py::object tell(Poller::Id, const std::exception_ptr& error) { return exception_of(error); }
  py::object tell(Poller::Id id, const Poller::Gone& gone) {
    protocols_.erase(id);
    if (gone.error == 0) return py::none();
    return exception_of(std::make_exception_ptr(
        std::system_error(gone.error, std::generic_category(), "the connection broke")));
  }

  // Before the poller: it refers to them to its end.
  std::map<Poller::Id, py::object> protocols_;
  Poller poller_;
};

// ---- DataService ------------------------------------------------------------------------------------

using SharedBlocks = std::vector<std::shared_ptr<device::SharedBlock>>;

std::unique_ptr<DataService> make_service(Shard& shard, uint64_t max_leased_bytes,
                                          const py::function& describe_blocks) {
  const auto called = held_by_others(describe_blocks);
  return std::make_unique<DataService>(
      shard, DataServiceOptions{.max_leased_bytes = max_leased_bytes,
                                .describe_blocks = [called](const SharedBlocks& blocks) {
                                  const py::gil_scoped_acquire gil;
                                  return (*called)(blocks).cast<std::string>();
                                }});
}

// (connection, whether it counts, the last record that it has) of each.
py::list followers_of(DataService& service) {
  py::list followers;
  for (const auto& [connection, follower] : service.replication().followers()) {
    followers.append(py::make_tuple(connection, follower.counts, follower.has));
  }
  return followers;
}

// rank -> (bytes pushed, bytes pulled, seconds of pushing, of pulling, of waiting).
py::dict traffic_of(DataService& service, double now_s) {
  py::dict told;
  for (const auto& [rank, traffic] : service.traffic()) {
    const auto [push_s, pull_s, wait_s] = traffic->seconds(now_s);
    told[py::int_(rank)] =
        py::make_tuple(traffic->pushed_bytes, traffic->pulled_bytes, push_s, pull_s, wait_s);
  }
  return told;
}

// (replies for connections, (connection, request, error) of requests that failed).
py::tuple wake(DataService& service, double now_s) {
  {
    const py::gil_scoped_release no_gil;
    service.wake(now_s);
  }
  py::list deliveries;
  for (auto& [connection, replies] : service.take_deliveries()) {
    deliveries.append(py::make_tuple(connection, parts_of(replies)));
  }
  py::list failures;
  for (const DataService::Failure& failure : service.take_failures()) {
    failures.append(
        py::make_tuple(failure.connection, failure.request, exception_of(failure.error)));
  }
  return py::make_tuple(std::move(deliveries), std::move(failures));
}

}  // namespace

void bind_server(py::module_& m) {
  using namespace py::literals;
  py::class_<PyServerProtocol, PyDecoder>(m, "ServerProtocol", py::is_final())
      .def(
          "open",
          [](PyServerProtocol& self, std::string writer, bool wants_checksum) {
            self.protocol().open(std::move(writer), wants_checksum);
          },
          py::kw_only(), "writer"_a, "wants_checksum"_a)
      .def(
          "attach",
          [](PyServerProtocol& self, uint32_t rank, uint32_t incarnation) {
            self.protocol().attach({rank, incarnation});
          },
          "rank"_a, "incarnation"_a)
      .def(
          "share",
          [](PyServerProtocol& self, std::shared_ptr<PushArena> arena) {
            self.client().arenas.push_back(std::move(arena));
          },
          "arena"_a)
      .def(
          "see",
          [](PyServerProtocol& self, std::shared_ptr<SeenMemory> memory) {
            self.client().seen.push_back(std::move(memory));
          },
          "memory"_a)
      .def(
          "see_no_more",
          [](PyServerProtocol& self, uint64_t address) {
            for (const auto& memory : self.client().seen) {
              if (memory->address() == address) memory->close();
            }
          },
          "address"_a)
      .def(
          "allow",
          [](PyServerProtocol& self, const std::vector<uint8_t>& ops) {
            self.protocol().allow(ops);
          },
          "ops"_a)
      .def("follow", [](PyServerProtocol& self) { self.protocol().follow(); })
      .def("ungate", [](PyServerProtocol& self) { self.protocol().ungate(); })
      .def("freeze_with_shard", [](PyServerProtocol& self) { self.protocol().freeze_with_shard(); })
      .def("lead", [](PyServerProtocol& self) { self.protocol().lead(); })
      .def("is_in_process", [](PyServerProtocol& self) { self.client().is_own = true; })
      .def("next_frame", &PyServerProtocol::next_frame, "now"_a = py::none())
      .def(
          "again",
          [](PyServerProtocol& self, std::shared_ptr<Frame> frame) {
            self.protocol().again(std::move(frame));
          },
          "frame"_a)
      .def("reply", &PyServerProtocol::reply, "pieces"_a)
      .def("take_replies", &PyServerProtocol::take_replies)
      .def_property_readonly("has_asked",
                             [](PyServerProtocol& self) { return self.protocol().has_asked(); });

  py::class_<DataService>(m, "DataService", py::is_final())
      .def(
          "connect",
          [](DataService& self, uint64_t connection, uint32_t max_body_bytes,
             uint64_t max_payload_bytes) {
            return std::make_unique<PyServerProtocol>(self, connection, max_body_bytes,
                                                      max_payload_bytes);
          },
          "connection"_a, py::kw_only(), "max_body_bytes"_a = kMaxBodyBytes,
          "max_payload_bytes"_a = kMaxPayloadBytes, py::keep_alive<0, 1>())
      .def("close", &DataService::close)
      .def("freeze", &DataService::freeze, "frozen"_a)
      .def(
          "record", [](DataService& self, std::string_view body) { self.record(body); }, "body"_a)
      .def("record_beat", &DataService::record_beat, "body"_a, "now"_a)
      .def(
          "set_lease",
          [](DataService& self, double seconds) { self.replication().set_lease(seconds); },
          "seconds"_a)
      .def("fill", &DataService::fill, "connection"_a)
      .def(
          "record_to",
          [](DataService& self, uint64_t connection, std::string_view body) {
            self.replication().record_to(
                connection, {.op = Op::kRECORD, .body = std::as_bytes(std::span(body))});
          },
          "connection"_a, "body"_a)
      .def(
          "count",
          [](DataService& self, uint64_t connection) { self.replication().count(connection); },
          "connection"_a)
      .def(
          "forget_follower",
          [](DataService& self, uint64_t connection) { self.replication().forget(connection); },
          "connection"_a)
      .def("followers", &followers_of)
      .def(
          "sees",
          [](DataService& self, uint64_t connection, uint64_t owner, uint64_t address) {
            self.replication().sees(connection, owner, address);
          },
          "connection"_a, py::kw_only(), "owner"_a, "address"_a)
      .def("take_ready", [](DataService& self) { return self.replication().take_ready(); })
      .def_property_readonly("is_followed",
                             [](DataService& self) { return self.replication().is_followed(); })
      .def_property_readonly("last_record",
                             [](DataService& self) { return self.replication().last(); })
      .def("newest_incarnation", &DataService::newest_incarnation, "rank"_a)
      .def_property_readonly("newest_incarnations",
                             [](DataService& self) { return self.newest_incarnations(); })
      .def(
          "attached",
          [](DataService& self, uint32_t rank, uint32_t incarnation) {
            self.attached({rank, incarnation});
          },
          "rank"_a, "incarnation"_a)
      .def("traffic", &traffic_of, "now"_a)
      .def("schema_changed", &DataService::schema_changed)
      .def("advanced", &DataService::advanced, "needs_scale"_a)
      .def("could_not_apply", &DataService::could_not_apply, "decision"_a, "record"_a)
      .def_property_readonly("applied", &DataService::applied)
      .def("forget", &DataService::forget, "connection"_a)
      .def("reading_since", &DataService::reading_since, "before"_a)
      .def("wake", &wake, "now"_a)
      .def("next_wake", &DataService::next_wake)
      .def_property_readonly("is_filling", &DataService::is_filling)
      .def_property_readonly("num_holds", &DataService::num_holds)
      .def_property_readonly("num_leases", &DataService::num_leases);

  const py::object shard = m.attr("Shard");
  shard.attr("make_data_service") = py::cpp_function(
      &make_service, py::name("make_data_service"), py::is_method(shard), py::kw_only(),
      "max_leased_bytes"_a, "describe_blocks"_a, py::keep_alive<0, 1>());

  py::class_<LocalLink, std::shared_ptr<LocalLink>>(m, "LocalLink", py::is_final())
      .def(py::init(&make_local_link), "protocol"_a)
      .def("take_event", &LocalLink::take_event)
      .def_property_readonly("has_answers", &LocalLink::has_answers)
      .def(
          "reply",
          [](LocalLink& self, const py::sequence& pieces) { self.reply(lend_all(pieces)); },
          "pieces"_a);

  py::class_<PyPoller>(m, "Poller", py::is_final())
      .def(py::init<DataService&, int, double>(), "service"_a, py::kw_only(), "wakeup_fd"_a,
           "busy_s"_a = 0.0, py::keep_alive<1, 2>())
      .def("fileno", &PyPoller::fileno)
      .def("add", &PyPoller::add, "connection"_a, py::kw_only(), "socket"_a, "protocol"_a,
           "tls"_a = nullptr)
      .def("send", &PyPoller::send, "connection"_a, "pieces"_a)
      .def("deliver", &PyPoller::deliver)
      .def("close", &PyPoller::close, "connection"_a)
      .def("drop", &PyPoller::drop, "connection"_a)
      .def("stalled", &PyPoller::stalled, "limit_s"_a)
      .def("unread", &PyPoller::unread, "limit_s"_a)
      .def("turn", &PyPoller::turn, "linger_s"_a);

  m.def(
      "break_rules",
      [](const std::vector<std::string>& names) {
        uint64_t broken = 0;
        for (const std::string& name : names) {
#define PSSTORE_X(rule, meaning) \
  if (name == #rule) broken |= uint64_t{1} << static_cast<uint32_t>(BreakableRule::k##rule);
          PSSTORE_BREAKABLE_RULES(PSSTORE_X)
#undef PSSTORE_X
        }
        broken_rules = broken;
      },
      "names"_a);
}

}  // namespace psstore::bindings
