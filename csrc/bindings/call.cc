// FramePlan, CallPlan, CallTerms, StartingParts and Call for Python.
#include "bindings/call.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <utility>

namespace psstore::bindings {

FramePlan::FramePlan(const FrameMap& map, const std::vector<size_t>& ways,
                     std::vector<py::object> tables)
    : map_(map), tables_(std::move(tables)) {
  if (ways.size() != map_.num_frames() || tables_.size() != map_.num_frames()) {
    throw py::value_error("every frame of the map has one way and one table");
  }
  for (const py::object& table : tables_)
    entries_.push_back(table.cast<const SliceTable&>().entries());
  for (const size_t way : ways) {
    const auto known = std::ranges::find(ways_, way);
    way_of_.push_back(static_cast<size_t>(known - ways_.begin()));
    if (known == ways_.end()) ways_.push_back(way);
  }
}

Call::Call(CallPlan plan, std::vector<Segments> memories, std::shared_ptr<const SessionList> store,
           const CallTerms& terms, std::optional<uint64_t> newer_than)
    : plan_(std::move(plan)),
      store_(std::move(store)),
      terms_(terms),
      memories_(std::move(memories)),
      answers_(plan_.frames->num_frames()),
      num_missing_(plan_.frames->num_frames()) {
  for (const size_t way : plan_.frames->ways()) sessions_.push_back(store_->sessions.at(way));
  for (const Segments& memory : memories_) num_bytes_ += memory.num_bytes();
  for (size_t frame = 0; newer_than && frame < plan_.frames->num_frames(); ++frame) {
    const auto entries = plan_.frames->table(frame);
    asking_.emplace_back(entries.begin(), entries.end());
    for (SliceEntry& entry : asking_.back()) entry.version = *newer_than + 1;
  }
}

void Call::start(std::shared_ptr<StartingParts> parts, py::object results) {
  parts_ = std::move(parts);
  results_ = std::move(results);
  whole_ = parts_->make();
}

bool Call::has_news() const {
  return terms_.carries && std::ranges::any_of(sessions_, &ClientSession::has_news);
}

void Call::ask(double now_s) {
  begun_s_ = now_s;
  const auto self = shared_from_this();
  try {
    for (size_t frame = 0; frame < plan_.frames->num_frames(); ++frame) {
      const Segments& memory = memories_[frame];
      auto request = std::make_shared<Request>();
      request->op = terms_.op;
      request->round = terms_.round;
      request->began_s = now_s;
      request->deadline_s = deadline_s();
      request->carries = terms_.carries;
      request->at_least = terms_.at_least;
      request->wait_s = terms_.wait_s;
      request->table = asking_.empty() ? plan_.frames->table(frame) : asking_[frame];
      request->memory = memory.ranges();
      request->memory_bytes = memory.num_bytes();
      request->asker = self;
      request->part = frame;
      ClientSession& session = *sessions_[plan_.frames->way(frame)];
      if (memory.num_bytes() < kReleaseGilBytes) {
        session.ask(std::move(request), now_s);
      } else {
        const std::shared_ptr<Request> kept = request;  // if it throws
        const py::gil_scoped_release no_gil;
        session.ask(std::move(request), now_s);
      }
    }
  } catch (...) {
    forget();
    throw;
  }
  if (parts_ != nullptr && terms_.op == Op::kPUSH) parts_->under_way.add(whole_);
}

bool Call::succeeded() const {
  return error_.is_none() && std::ranges::none_of(answers_, [](const auto& answer) {
           return first_failure(answer->table).has_value();
         });
}

py::list Call::answers() const {
  py::list made;
  for (const std::shared_ptr<Frame>& answer : answers_) made.append(py::cast(answer));
  return made;
}

bool Call::leaves_something() const {
  return std::ranges::any_of(sessions_, [](const ClientSession* session) {
    const bool owes_releases = session->num_releases() != 0 && !session->release_is_due;
    return owes_releases || session->link().wants_turn();
  });
}

bool Call::forgotten() const {
  if (over()) return true;  // a part that is received has failed
  if (forgotten_ || whole_.is_none()) return forgotten_;
  const py::gil_scoped_acquire gil;
  return whole_.attr("cancelled")().cast<bool>();
}

void Call::forget() {
  forgotten_ = true;
  for (ClientSession* const session : sessions_) session->keep_cancelled();
}

void Call::answered(size_t part, std::shared_ptr<Frame> answer) {
  answers_[part] = std::move(answer);
  one_less();
}

void Call::failed(size_t /*part*/, const py::object& error) {
  if (error_.is_none()) error_ = error;
  one_less();
}

void Call::one_less() {
  if (--num_missing_ > 0) return;
  if (parts_ != nullptr) conclude();
  if (!waiting_.is_none() && !waiting_.attr("done")().cast<bool>()) {
    waiting_.attr("set_result")(py::none());
  }
}

void Call::conclude() {
  const bool nothing_to_see = !plan_.reads && succeeded();
  parts_->ended(whole_, plan_.op, plan_.layout, nothing_to_see ? py::list() : answers(), error_,
                results_);
}

void bind_calls(py::module_& m) {
  using namespace py::literals;
  py::class_<FramePlan>(m, "FramePlan", py::is_final())
      .def(py::init<const FrameMap&, const std::vector<size_t>&, std::vector<py::object>>(),
           "arrays"_a, "ways"_a, "tables"_a);

  py::class_<CallPlan>(m, "CallPlan", py::is_final())
      .def(py::init([](const py::str& op, py::object layout, py::object frames) {
             const auto& plan = frames.cast<const FramePlan&>();
             PyObject* name = op.inc_ref().ptr();
             PyUnicode_InternInPlace(&name);
             auto interned_op = py::reinterpret_steal<py::str>(name);
             const bool reads = interned_op.equal(py::str("PULL"));
             return CallPlan{std::move(interned_op), std::move(layout), std::move(frames), &plan,
                             reads};
           }),
           "op"_a, "layout"_a, "frames"_a)
      .def_property_readonly("op", [](const CallPlan& self) { return self.op; })
      .def_property_readonly("layout", [](const CallPlan& self) { return self.layout; });

  py::class_<CallTerms>(m, "CallTerms", py::is_final())
      .def(py::init([](uint8_t op, double timeout_s, uint64_t round, bool carries,
                       uint64_t at_least, double wait_s) {
             return CallTerms{Op{op}, timeout_s, round, carries, at_least, wait_s};
           }),
           "op"_a, "timeout_s"_a, "round"_a = 0, "carries"_a = false, "at_least"_a = 0,
           "wait_s"_a = 0.0);

  py::class_<StartingParts, std::shared_ptr<StartingParts>>(m, "StartingParts", py::is_final())
      .def(py::init([](py::object make, py::object ended, py::object look_after,
                       py::object catch_up, py::object paced, py::set under_way) {
             return StartingParts{std::move(make),     std::move(ended), std::move(look_after),
                                  std::move(catch_up), std::move(paced), std::move(under_way)};
           }),
           py::kw_only(), "make"_a, "ended"_a, "look_after"_a, "catch_up"_a, "paced"_a,
           "under_way"_a);

  py::class_<Call, std::shared_ptr<Call>>(m, "Call", py::is_final())
      .def_property_readonly("over", &Call::over)
      .def("answers", &Call::answers)
      .def("take_error", &Call::take_error)
      .def("wait", &Call::wait, "future"_a)
      .def("forget", &Call::forget);
}

}  // namespace psstore::bindings
