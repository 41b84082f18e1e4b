#include "bindings/attempt.h"

#include <algorithm>
#include <utility>

#include "wire/encoder.h"

namespace psstore::bindings {

FramePlan::FramePlan(const FrameMap& map, std::vector<size_t> ways, std::vector<py::object> tables)
    : map_(map), ways_(std::move(ways)), tables_(std::move(tables)) {
  if (ways_.size() != map_.num_frames() || tables_.size() != map_.num_frames()) {
    throw py::value_error("every frame of the map has one way and one table");
  }
  for (size_t frame = 0; frame < ways_.size(); ++frame) {
    entries_.push_back(tables_[frame].cast<const SliceTable&>().entries());
    const auto peer = std::ranges::find(peers_, ways_[frame]);
    peer_of_.push_back(static_cast<size_t>(peer - peers_.begin()));
    if (peer == peers_.end()) peers_.push_back(ways_[frame]);
  }
}

bool Sender::has_told(uint64_t decision) const {
  return std::ranges::all_of(
      lines, [decision](const RequestLine* line) { return line->told >= decision; });
}

std::span<const std::byte> Terms::body_for(size_t way) const {
  if (bodies.empty()) return {};
  return std::as_bytes(std::span(bodies.size() == 1 ? bodies.front() : bodies.at(way)));
}

Attempt::Attempt(const FramePlan& plan, std::vector<Segments> memories, const Sender& sender,
                 const Terms& terms, std::optional<uint64_t> newer_than)
    : plan_(plan), memories_(std::move(memories)), sender_(sender), terms_(terms) {
  for (size_t frame = 0; newer_than && frame < num_frames(); ++frame) {
    std::vector<SliceEntry> entries(plan_.table(frame).begin(), plan_.table(frame).end());
    for (SliceEntry& entry : entries) entry.version = *newer_than + 1;
    asking_.push_back(py::cast(SliceTable(std::move(entries))));
  }
}

std::span<const SliceEntry> Attempt::table(size_t frame) const {
  return asking_.empty() ? plan_.table(frame) : asking_[frame].cast<const SliceTable&>().entries();
}

const py::object& Attempt::table_object(size_t frame) const {
  return asking_.empty() ? plan_.table_object(frame) : asking_[frame];
}

// ---- on its way -------------------------------------------------------------------------------------

bool Attempt::possible() const {
  return all_lines(&RequestLine::quiet);
}

bool Attempt::all_quiet() const {
  return std::ranges::all_of(sender_.lines, [](const RequestLine* line) { return line->quiet(); });
}

bool Attempt::sendable() const {
  return all_lines(&RequestLine::connected);
}

bool Attempt::all_lines(bool (RequestLine::*ready)() const) const {
  for (size_t frame = 0; frame < plan_.num_frames(); ++frame) {
    if (!(line(frame).*ready)()) return false;
  }
  return true;
}

std::vector<const RequestLine*> Attempt::lines() const {
  std::vector<const RequestLine*> found;
  for (size_t peer = 0; peer < plan_.peers().size(); ++peer) found.push_back(&line_of(peer));
  return found;
}

bool Attempt::is_small() const {
  size_t num_bytes = 0;
  for (const Segments& memory : memories_) num_bytes += memory.num_bytes();
  return num_bytes < kReleaseGilBytes;
}

bool Attempt::can_wait() const {
  if (!is_small()) return false;
  for (size_t peer = 0; peer < plan_.peers().size(); ++peer) {
    const RequestLine& to = line_of(peer);
    if (!to.answer_is_near() || to.held_bytes() >= kMaxHeldBytes) return false;
  }
  return true;
}

bool Attempt::looked_at(double deadline_s) const {
  for (size_t peer = 0; peer < plan_.peers().size(); ++peer) {
    if (line_of(peer).looks_at > deadline_s) return false;
  }
  return true;
}

bool Attempt::send(bool waits) {
  make();
  waits_ = waits;
  if (waits) return true;
  if (!all_lines(&RequestLine::free)) return false;
  if (is_small()) return exchange_->send();
  const py::gil_scoped_release released;
  return exchange_->send();
}

bool Attempt::run(int bell, std::chrono::nanoseconds busy) {
  make();
  const py::gil_scoped_release released;
  return exchange_->run(bell, busy);
}

void Attempt::make() {
  std::vector<Peer> peers;
  peers.reserve(plan_.peers().size());
  for (size_t peer = 0; peer < plan_.peers().size(); ++peer) {
    peers.push_back({line_of(peer).fd(), &line_of(peer).decoder().decoder(), nullptr});
  }
  std::vector<Call> calls;
  calls.reserve(plan_.num_frames());
  for (size_t frame = 0; frame < plan_.num_frames(); ++frame) calls.push_back(make_call(frame));
  exchange_ = std::make_shared<Exchange>(std::move(peers), std::move(calls));
}

Call Attempt::make_call(size_t frame) {
  const Segments& memory = memories_[frame];
  RequestLine& to = line(frame);
  FrameParts parts{.op = terms_.op,
                   .request = to.next_request,
                   .round = terms_.round,
                   .rank = sender_.rank,
                   .incarnation = sender_.incarnation,
                   .table = table(frame),
                   .body = terms_.body_for(plan_.way(frame))};
  const bool shares = !to.carries(memory.num_bytes());
  std::optional<std::vector<SliceEntry>> placed;
  if (terms_.reads()) {
    parts.shared = shares;
  } else {
    parts.payload_bytes = memory.num_bytes();
    if (shares) placed = place(frame, parts.request);
    if (placed) {
      parts.shared = true;
      parts.table = *placed;
    } else if (sender_.checksum) {
      parts.payload_crc = memory.checksum();
    }
  }
  check_parts(parts);
  if (terms_.is_numbered()) parts.sequence = ++to.last_write;
  ++to.next_request;
  to.told = std::max(to.told, terms_.told);
  writes_.push_back(parts.sequence);
  Call call{.peer = plan_.peer(frame),
            .head = std::vector<std::byte>(to.release_bytes() + parts.encoded_bytes()),
            .payload = {},
            .destination = {},
            .request = parts.request,
            .reply = Op{static_cast<uint8_t>(static_cast<uint8_t>(terms_.op) + 1)}};
  encode_frame(parts, call.head.data() + to.release_bytes());
  to.take_releases(call.head.data());
  if (terms_.reads()) {
    call.destination = memory.ranges();
    if (shares) call.memory = to.memory();
  } else if (!placed) {
    call.payload = memory.ranges();
  }
  return call;
}

std::optional<std::vector<SliceEntry>> Attempt::place(size_t frame, uint64_t request) {
  const std::span<const SliceEntry> entries = table(frame);
  const py::gil_scoped_release no_gil;
  return line(frame).memory()->place(entries, memories_[frame].ranges(), request);
}

// ---- answered --------------------------------------------------------------------------------------

void Attempt::note_answers(double now_s) const {
  const std::span<Call> calls = exchange_->calls();
  for (size_t frame = 0; frame < calls.size(); ++frame) {
    if (calls[frame].answer != nullptr) note_answer(frame, *calls[frame].answer, now_s);
  }
}

void Attempt::note_answer(size_t frame, const Frame& answer, double now_s) const {
  RequestLine& from = line(frame);
  from.heard(answer.header.sequence, terms_.scaled, now_s);
  if (answer.header.is_shared()) from.add_release(answer.header.request);
}

bool Attempt::owes_releases() const {
  return std::ranges::any_of(plan_.peers(), [this](size_t way) {
    const RequestLine& one = *sender_.lines[way];
    return one.num_releases() != 0 && !one.release_is_due;
  });
}

bool Attempt::succeeded() const {
  return std::ranges::none_of(exchange_->calls(), [](const Call& call) {
    return first_failure(call.answer->table).has_value();
  });
}

py::list Attempt::answers() const {
  py::list made;
  for (const Call& call : exchange_->calls()) made.append(py::cast(call.answer));
  return made;
}

// ---- handed over ------------------------------------------------------------------------------------

// Moving a Segments leaves its ranges where they are, for the exchange.
py::object Attempt::memory(size_t frame) {
  memory_objects_.resize(num_frames());
  py::object& made = memory_objects_[frame];
  if (!made) made = py::cast(std::move(memories_[frame]));
  return made;
}

py::list Attempt::hand_over(py::list& futures, double now_s) {
  py::list results = leave_requests(futures, now_s);
  leave_received();
  // What is unsent lies in the exchange and in the memories.
  for (size_t frame = 0; frame < num_frames(); ++frame) memory(frame);
  leave_unsent(std::make_shared<std::pair<std::shared_ptr<Exchange>, std::vector<py::object>>>(
      exchange_, memory_objects_));
  return results;
}

py::list Attempt::leave_requests(py::list& futures, double begun_s) {
  py::list results = answers();
  for (size_t frame = 0; frame < num_frames(); ++frame) {
    if (call(frame).answer != nullptr) continue;
    const py::object future = futures.attr("pop")(0);
    const py::object request = make_request(frame, future, memory(frame), begun_s);
    line(frame).add(call(frame).request, request);
    results[frame] = request;
  }
  return results;
}

py::object Attempt::make_request(size_t frame, const py::object& future, const py::object& memory,
                                 double now_s) const {
  using namespace py::literals;
  return sender_.request(
      "id"_a = exchange_->calls()[frame].request, "op"_a = static_cast<int>(terms_.op),
      "future"_a = future, "deadline"_a = now_s + terms_.timeout_s, "started"_a = now_s,
      "table"_a = table_object(frame), "body"_a = terms_.body, "round"_a = terms_.round,
      "sequence"_a = writes_[frame], "scaled"_a = terms_.scaled,
      py::arg(terms_.reads() ? "destination" : "payload") = memory);
}

void Attempt::leave_received() {
  for (size_t frame = 0; frame < num_frames(); ++frame) {
    if (call(frame).receiving) line(frame).decoder().keep(memory(frame));
  }
  for (size_t peer = 0; peer < plan_.peers().size(); ++peer) {
    std::shared_ptr<Frame>& other = exchange_->peers()[peer].other;
    if (other != nullptr) line_of(peer).decoder().put_back(std::move(other));
  }
}

void Attempt::leave_unsent(std::shared_ptr<void> owner) {
  for (size_t peer = 0; peer < plan_.peers().size(); ++peer) {
    RequestLine& to = line_of(peer);
    const uint64_t last_write = terms_.reads() ? 0 : to.next_request - 1;
    if (waits_) {
      to.hold(exchange_->unsent(peer), owner, last_write);
      continue;
    }
    if (last_write != 0) to.sent_write(last_write);
    to.leave(exchange_->unsent(peer), owner);
  }
}

void Attempt::note_waiting(py::list& holding) const {
  for (const size_t way : plan_.peers()) {
    const py::object line = sender_.owner[way];
    if (!holding.contains(line)) holding.append(line);
  }
}

}  // namespace psstore::bindings
