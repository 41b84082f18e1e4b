// One call that pushes or pulls tensors in a way that was worked out before: its requests, and what becomes of them.
//
// It costs no Python but one call at its end, if it was started and not waited for.
//
// Needs the GIL and the loop: whoever has it, one thread at a time.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "bindings/frame_map.h"
#include "bindings/session.h"
#include "wire/slice_table.h"

namespace psstore::bindings {

// The frames of a layout.
class FramePlan {
 public:
  // `ways`, `tables`: of each frame; a table is a SliceTable.
  FramePlan(const FrameMap& map, const std::vector<size_t>& ways, std::vector<py::object> tables);

  const FrameMap& map() const { return map_; }
  size_t num_frames() const { return way_of_.size(); }
  // The ways, each once; and which of them is a frame's.
  const std::vector<size_t>& ways() const { return ways_; }
  size_t way(size_t frame) const { return way_of_[frame]; }
  std::span<const SliceEntry> table(size_t frame) const { return entries_[frame]; }

 private:
  FrameMap map_;
  std::vector<size_t> ways_;
  std::vector<size_t> way_of_;
  std::vector<py::object> tables_;
  std::vector<std::span<const SliceEntry>> entries_;  // of the tables, which never change
};

// What a call came to: an operation, and how its arrays go to and from the shards.
struct CallPlan {
  py::str op;
  py::object layout;  // of Python
  py::object frames_object;
  const FramePlan* frames;
  bool reads;
};

// What the frames of a call say besides their slices.
struct CallTerms {
  Op op;
  double timeout_s;
  uint64_t round;
  bool carries;  // decisions that its shards were not told yet
  uint64_t at_least;
  double wait_s;
};

// What started calls ask of Python. `whole`: what a caller has.
struct StartingParts {
  py::object make;  // () -> a whole
  py::object
      ended;  // (whole, op, layout, answers, error, results): no answers if there is nothing to see in them
  py::object look_after;  // (layout): something is left to whoever drives its connections
  py::object catch_up;    // (): has what was asked of the loop before begin now, if it can
  py::object paced;       // () -> whether calls have to wait for their turns
  py::set under_way;      // pushes
};

// The sessions of a store, by way.
struct SessionList {
  explicit SessionList(py::list given) : objects(std::move(given)) {
    for (const py::handle one : objects) sessions.push_back(&one.cast<PySession&>().session);
  }
  bool all_quiet() const { return std::ranges::all_of(sessions, &ClientSession::is_quiet); }

  py::list objects;
  std::vector<ClientSession*> sessions;
};

class Call final : public PyAsker, public std::enable_shared_from_this<Call> {
 public:
  // `newer_than`: of a read, which leaves out what is of that version or older.
  Call(CallPlan plan, std::vector<Segments> memories, std::shared_ptr<const SessionList> store,
       const CallTerms& terms, std::optional<uint64_t> newer_than = {});

  // It is not waited for. `results`: what a read returns.
  void start(std::shared_ptr<StartingParts> parts, py::object results);
  // What its caller has then.
  const py::object& whole() const { return whole_; }

  // Those that its frames go to, each once.
  std::span<ClientSession* const> sessions() const { return sessions_; }
  // The Python object of a session.
  py::object object_of(size_t session) const {
    return store_->objects[plan_.frames->ways()[session]];
  }
  // Nothing is under way in its whole store.
  bool leaves_quiet() const { return store_->all_quiet(); }
  // A few bytes, either way: moved in less time than it takes to get the GIL back.
  bool is_small() const { return num_bytes_ < kReleaseGilBytes; }
  // Some of its sessions has something to tell that only Python can say.
  bool has_news() const;
  double deadline_s() const { return begun_s_ + terms_.timeout_s; }

  // Asks its sessions. If it throws, what was asked until then is forgotten.
  void ask(double now_s);

  // Nobody waits for it any more, and its arrays are their owner's again.
  void forget();
  bool over() const { return num_missing_ == 0; }
  // REQUIRES of these: it is over.
  bool succeeded() const;
  py::list answers() const;
  // Something is left to whoever drives its connections: what was read is told with the next request, and nobody sees to
  // it that it is told at all; or a shard of this process has something to do.
  bool leaves_something() const;
  // What was raised for a request of it, or None. It is let go of: whoever raises it has frames in its traceback that hold
  // this call, and Python's collector does not see what a call holds.
  py::object take_error() { return std::exchange(error_, py::none()); }
  // The future is told when it is over.
  void wait(py::object future) { waiting_ = std::move(future); }

  bool forgotten() const override;
  void answered(size_t part, std::shared_ptr<Frame> answer) override;
  void failed(size_t part, const py::object& error) override;

 private:
  void one_less();
  void conclude();

  const CallPlan plan_;
  const std::shared_ptr<const SessionList> store_;
  std::vector<ClientSession*> sessions_;
  const CallTerms terms_;
  std::vector<Segments> memories_;
  std::vector<std::vector<SliceEntry>>
      asking_;  // tables that say versions, if they are to be newer
  size_t num_bytes_ = 0;
  std::vector<std::shared_ptr<Frame>> answers_;
  size_t num_missing_;
  double begun_s_ = 0;
  bool forgotten_ = false;
  py::object error_ = py::none();
  py::object waiting_ = py::none();
  std::shared_ptr<StartingParts> parts_;  // null: it is waited for
  py::object whole_ = py::none();
  py::object results_ = py::none();
};

}  // namespace psstore::bindings
