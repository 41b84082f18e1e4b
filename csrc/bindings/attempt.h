// The frames of one call, made and sent without the event loop, and what becomes of them: answers, or
// requests that their sessions have.
//
// Needs the GIL, but for the exchange itself, and the loop: whoever has it, one thread at a time.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bindings/frame_map.h"
#include "bindings/request_line.h"
#include "client/exchange.h"
#include "wire/slice_table.h"

namespace psstore::bindings {

// The frames of a layout.
class FramePlan {
 public:
  // `tables`: each a SliceTable.
  FramePlan(const FrameMap& map, std::vector<size_t> ways, std::vector<py::object> tables);

  const FrameMap& map() const { return map_; }
  size_t num_frames() const { return ways_.size(); }
  size_t way(size_t frame) const { return ways_[frame]; }
  // The ways, each once; and which of them is a frame's.
  const std::vector<size_t>& peers() const { return peers_; }
  size_t peer(size_t frame) const { return peer_of_[frame]; }
  std::span<const SliceEntry> table(size_t frame) const { return entries_[frame]; }
  const py::object& table_object(size_t frame) const { return tables_[frame]; }

 private:
  FrameMap map_;
  std::vector<size_t> ways_;
  std::vector<size_t> peers_;
  std::vector<size_t> peer_of_;
  std::vector<py::object> tables_;
  std::vector<std::span<const SliceEntry>> entries_;  // of the tables, which never change
};

// Who sends, and over what.
struct Sender {
  std::vector<RequestLine*> lines;  // of each way
  py::list owner;                   // of the lines
  py::object request;               // the class of a session's requests
  uint32_t rank;
  uint32_t incarnation;
  bool checksum;
  bool keeps_releases;  // no value takes a step before this worker asks for something again

  // That decision was told over every way.
  bool has_told(uint64_t decision) const;
};

// What the frames of a call say besides their slices.
struct Terms {
  Op op;
  uint64_t round;
  double timeout_s;
  py::object body;                  // the message of the bodies, or None
  std::vector<std::string> bodies;  // none, one for all ways, or one for each
  uint64_t told;                    // the last decision that they tell
  uint64_t scaled;                  // the decision whose scale they tell; 0: none

  bool reads() const { return op == Op::kPULL; }
  // Its frames are writes with a sequence.
  bool is_numbered() const { return op == Op::kASSIGN || op == Op::kADD || op == Op::kRESTORE; }
  std::span<const std::byte> body_for(size_t way) const;
};

// Words that values were read which wait for the next request: of as many answers as may be leased a few are left.
inline constexpr size_t kMaxKeptReleases = 64;

// What waits on a line to go out together, at most: it goes out with the GIL held.
inline constexpr size_t kMaxHeldBytes = kReleaseGilBytes;

class Attempt {
 public:
  // `memories`: of each frame. `newer_than`: of a read, which leaves out what is of that version or older.
  Attempt(const FramePlan& plan, std::vector<Segments> memories, const Sender& sender,
          const Terms& terms, std::optional<uint64_t> newer_than = {});

  size_t num_frames() const { return plan_.num_frames(); }
  bool reads() const { return terms_.reads(); }
  RequestLine& line(size_t frame) const { return *sender_.lines.at(plan_.way(frame)); }
  // Of all frames, each once.
  std::vector<const RequestLine*> lines() const;
  // The memory of a frame as Python has it.
  py::object memory(size_t frame);
  // Nothing else is under way: it can `run`.
  bool possible() const;
  // Nor over any other way of its sender's.
  bool all_quiet() const;
  // The same, but that others wait for their answers, or for the kernel: it can `send`.
  bool sendable() const;
  // A few bytes, either way: moved in less time than it takes to get the GIL back.
  bool is_small() const;
  // The answer to a write on each of its lines is near, and little waits for it there: it can wait, too.
  bool can_wait() const;
  // Its sessions look at deadlines by then.
  bool looked_at(double deadline_s) const;
  // Sends what the kernel takes, or nothing yet if it `waits`, or if others wait for the kernel. True: there is
  // nothing for the kernel to take later.
  bool send(bool waits = false);
  // Sends all and receives what comes, without the GIL. True: all is answered.
  bool run(int bell, std::chrono::nanoseconds busy);
  // On their lines. `now_s`: on the event loop's clock.
  void note_answers(double now_s) const;
  // The same of one: what was read in shared memory is to be told.
  void note_answer(size_t frame, const Frame& answer, double now_s) const;
  // Tells now what was read in shared memory, where that is not to wait. `await_room`: of a line that has not sent all.
  template <typename AwaitRoom>
  void tell_releases(AwaitRoom await_room) const {
    for (const size_t way : plan_.peers()) {
      RequestLine& to = *sender_.lines[way];
      const size_t num_kept = sender_.keeps_releases ? kMaxKeptReleases : 1;
      if (to.num_releases() >= num_kept && !to.send_releases()) await_room(to);
    }
  }
  // What was read is told with the next request, and nobody sees to it that it is told at all.
  bool owes_releases() const;

  // ---- a frame of it, once it is sent ----

  const Call& call(size_t frame) const { return exchange_->calls()[frame]; }
  // Somebody else has received it.
  void answer(size_t frame, std::shared_ptr<Frame> reply) {
    exchange_->calls()[frame].answer = std::move(reply);
  }

  // ---- once all is answered ----

  bool succeeded() const;
  py::list answers() const;

  // ---- or not ----

  // All that is left of a `run`: see the next three. Returns the answers, and in their places the requests.
  py::list hand_over(py::list& futures, double now_s);
  // To their sessions: requests for the answers that are missing. `futures`: of the requests; the first of them
  // are taken out. REQUIRES: one for each.
  py::list leave_requests(py::list& futures, double begun_s);
  // To whoever drives the connections: what was fetched in vain,
  void leave_received();
  // and what is still to be written, or to wait on its lines. `owner` keeps all of it.
  void leave_unsent(std::shared_ptr<void> owner);
  // Adds the lines on which it waits to `holding`, each once.
  void note_waiting(py::list& holding) const;

 private:
  std::span<const SliceEntry> table(size_t frame) const;
  const py::object& table_object(size_t frame) const;
  RequestLine& line_of(size_t peer) const { return *sender_.lines[plan_.peers()[peer]]; }
  // They are to carry its frames, and are ready.
  bool all_lines(bool (RequestLine::*ready)() const) const;
  void make();
  Call make_call(size_t frame);
  // The table that says where the payload lies from now on; none: it has to go over the stream.
  std::optional<std::vector<SliceEntry>> place(size_t frame, uint64_t request);
  py::object make_request(size_t frame, const py::object& future, const py::object& memory,
                          double now_s) const;

  const FramePlan& plan_;
  std::vector<Segments> memories_;
  std::vector<py::object> asking_;  // tables that say versions, if they are to be newer
  const Sender& sender_;
  const Terms& terms_;
  std::vector<uint64_t> writes_;  // sequence of each frame
  bool waits_ = false;
  std::vector<py::object> memory_objects_;  // of each frame, as far as they were asked for
  std::shared_ptr<Exchange> exchange_;
};

}  // namespace psstore::bindings
