// One connection of a shard: bytes in; out come the replies to requests for data, and every frame that is
// somebody else's, in the order of arrival.
//
//   decoder ─► frame ─► data service ─► replies        Sans-IO, as the decoder is. Until open() every frame
//                └────► whoever calls                  comes out.
//                  ▲          │ again()
//                  └──────────┘
#pragma once

#include <bitset>
#include <exception>
#include <memory>
#include <span>
#include <string>

#include "server/data_service.h"
#include "wire/decoder.h"

namespace psstore {

class ServerProtocol {
 public:
  // Both live as long as this.
  ServerProtocol(FrameDecoder& decoder, DataService& service, uint64_t connection)
      : decoder_(decoder), service_(service), client_(std::make_shared<ConnectedClient>()) {
    client_->connection = connection;
    replies_.set_gate(&service.replication(), connection);
  }

  // From now on requests for data are answered here. `writer`: who numbers its plain writes.
  void open(std::string writer, bool wants_checksum);
  // Of requests for data its client may make these only. As long as nobody says so: all.
  void allow(std::span<const uint8_t> ops);
  // It is that worker, too. REQUIRES: open().
  void attach(const Life& worker);
  // From now on a standby is at the other end, which is sent what changes and says what it has. REQUIRES: open().
  void follow();
  // Its peer is one of the store's own processes, or an operator, who sees to standbys: replies wait for none of them.
  void ungate() { replies_.set_gate(nullptr, client_->connection); }
  // From now on it is not heard by a shard that is frozen.
  void freeze_with_shard() { freezes_ = true; }
  // At the other end is the shard that this one is a standby of.
  void lead();
  // Its memory, leases, and where it runs.
  ConnectedClient& client() { return *client_; }

  // The next frame that is somebody else's, as of FrameDecoder::next_frame: who is to answer an announcement
  // gets the complete frame, too. A request for data comes out if it brings a decision that is new here.
  // Null: more bytes are needed, or replies are to be taken first. Throws Error: the client is at fault. `now_s`:
  // on the clock of all of the service's connections.
  std::shared_ptr<Frame> next_frame(double now_s);
  // What came out last is a request for data, and what it brought is no news any more: next_frame answers it.
  void again(std::shared_ptr<Frame> frame);
  // Whether a request has come since open().
  bool has_asked() const { return asked_; }
  // To the requests answered since; to be sent before anything else is.
  Replies& replies() { return replies_; }
  // Nothing is heard of the peer for now. It has to read first; but what a standby has is heard whatever it is owed. Or
  // the shard is frozen.
  bool is_shut() const {
    if (client_->follows) return false;
    return replies_.is_full() || (freezes_ && service_.is_frozen());
  }

 private:
  std::shared_ptr<Frame> fetch();
  // Whether it was between a shard and its standby, and neither for others.
  bool take_record(const std::shared_ptr<Frame>& frame);
  // Whether it was a request for data: it is answered, or has failed, or its payload is received.
  bool take(const std::shared_ptr<Frame>& frame, double now_s);
  bool is_allowed(Op op) const { return allowed_.test(static_cast<uint8_t>(op)); }
  // Throws NOT_ALLOWED.
  void check_allowed(Op op) const;
  void attach_payload(Frame& frame) const;
  void receive(Frame& frame);

  FrameDecoder& decoder_;
  DataService& service_;
  const std::shared_ptr<ConnectedClient> client_;
  std::bitset<256> allowed_ = std::bitset<256>().set();  // by operation
  bool open_ = false;
  bool announced_ = false;      // to others: the frame that is arriving
  std::exception_ptr refused_;  // why the payload that is arriving is discarded
  std::shared_ptr<Frame> again_;
  bool asked_ = false;
  bool freezes_ = false;
  Replies replies_;
};

}  // namespace psstore
