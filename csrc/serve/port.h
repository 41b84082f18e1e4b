// One connection of a shard: bytes in; out come the replies to what the desk could answer, and every
// frame that it could not, in the order of arrival.
//
//   decoder ─► frame ─► desk ─► replies        Sans-IO, as the decoder is. Until open() every frame comes out.
//                └────► whoever calls
#pragma once

#include <memory>

#include "serve/desk.h"
#include "wire/decoder.h"

namespace psstore {

// Replies that may wait in a port: beyond it they have to be taken before it goes on. What a peer can make
// us hold at once is this, and one reply.
inline constexpr size_t kMaxWaitingReplyBytes = 256u << 10;

class Port {
 public:
  // Both live as long as the port.
  Port(FrameDecoder& decoder, Desk& desk) : decoder_(decoder), desk_(desk) {}

  // From now on requests of that client are answered here if they are ordinary.
  void open(Desk::Peer peer) { peer_ = std::move(peer); }
  // It is that worker, too. REQUIRES: open().
  void attach(const Life& worker);

  // The next frame that is for others, as of FrameDecoder::next_frame: who is to answer an announcement
  // gets the complete frame, too. Null: more bytes are needed, or replies are to be taken first. `now_s`: on
  // the clock of all of the desk's ports.
  std::shared_ptr<Frame> next_frame(double now_s);
  // Whether a request has come since open().
  bool has_asked() const { return asked_; }
  // To the requests answered since; to be sent before anything else is.
  Replies& replies() { return replies_; }

 private:
  // Whether the desk took it: has answered it, or made room for its payload.
  bool take(const std::shared_ptr<Frame>& frame, double now_s);
  bool receive(Frame& frame);

  FrameDecoder& decoder_;
  Desk& desk_;
  std::optional<Desk::Peer> peer_;  // empty: not open
  bool announced_ = false;          // to others: the frame that is arriving
  bool asked_ = false;
  Replies replies_;
};

}  // namespace psstore
