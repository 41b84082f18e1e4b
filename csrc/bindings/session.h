// The Python object ClientSession: a session (client/session.h) whose requests may be Python's.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/common.h"
#include "bindings/memory.h"
#include "client/session.h"

namespace psstore::bindings {

// An asker that can be told of errors. Destroyed with the GIL held, as all that sessions let go of.
class PyAsker : public Asker {
 public:
  // The answer to its request number `part` will never come.
  virtual void failed(size_t part, const py::object& error) = 0;
};

// What Python tells a session to carry.
class PyDecisions final : public CarriedDecisions {
 public:
  // `news`: a weak reference to (told) -> (newest, decisions, scaled, factor).
  explicit PyDecisions(py::object news) : news_(std::move(news)) {}
  News since(uint64_t told) override;

 private:
  py::object news_;
};

class PySession {
 public:
  // `answer`: the class of what futures get of slices. `understand`: (op, body) -> what they get of a control message.
  // `encode`: (message, waited_s) -> body.
  PySession(std::shared_ptr<PyDecisions> decisions, py::object answer, py::object understand,
            py::object encode)
      : session(decisions),
        answer_(std::move(answer)),
        understand_(std::move(understand)),
        encode_(std::move(encode)),
        decisions_(std::move(decisions)) {}

  ClientSession session;
  // The device memory that the connection shares with the shard, or None.
  py::object near = py::none();

  struct Asked {
    uint8_t op;
    py::object future;
    double now_s;
    double timeout_s;
    py::object table;    // a SliceTable, or None
    py::object carry;    // (at_least, wait_s), or None: it carries nothing
    py::object message;  // its body then; behind a carry: the ids of rows that it asks for; or None
    py::object memory;   // where its payload comes from, or its answer's goes
    bool may_land;
    uint64_t round;
    uint64_t sequence;  // of what is no write that counts once
  };
  void ask(const Asked& asked);
  // False: there is no such request any more.
  bool finish(uint64_t number, const py::object& result);
  bool fail(uint64_t number, const py::object& error);

  // False: the connection is lost.
  bool receive(double now_s);
  void feed(const py::object& data);
  std::shared_ptr<Frame> next_frame();
  void accept(const py::object& destination);
  void disconnected();
  // True: there is nothing left for the kernel to take.
  bool send();
  // Of each frame that is to be sent, its pieces.
  py::list take_output();

  // What an answer said that nobody understands: thrown whenever more is asked of the connection.
  void misunderstand(py::object error) { misunderstood_ = std::move(error); }
  // Nothing is under way, nothing has come that Python has to see to, and nothing waits to be told.
  bool is_settled() const {
    return misunderstood_.is_none() && session.is_quiet() && session.num_releases() == 0;
  }

  const py::object& answer() const { return answer_; }
  const py::object& understand() const { return understand_; }
  const py::object& encode() const { return encode_; }

 private:
  // What came is told, also where `take` throws.
  template <typename Take>
  auto telling(Take take);

  const py::object answer_;
  const py::object understand_;
  const py::object encode_;
  const std::shared_ptr<PyDecisions> decisions_;
  py::object destination_ = py::none();  // of a payload that Python has accepted
  py::object misunderstood_ = py::none();
};

}  // namespace psstore::bindings
