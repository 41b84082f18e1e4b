// A client and a shard of one process: what the one says the other hears at once, and answers as far as it is data.
//
//   session ─► outgoing ─► decoder ─► server protocol ─► frames for others
//      ▲                                    │
//      └──────────── answers ◄──────────────┘◄── what others answer
//
// Sans-IO, and without Python: its two ends are driven by one thread at a time, which has both.
#pragma once

#include <cstddef>
#include <exception>
#include <memory>
#include <span>
#include <utility>

#include "client/link.h"
#include "server/server_protocol.h"

namespace psstore {

class LocalLink final : public LocalEnd {
 public:
  // `owner`: keeps the others.
  LocalLink(FrameDecoder& decoder, ServerProtocol& protocol, const DataService& service,
            std::shared_ptr<const void> owner)
      : owner_(std::move(owner)), decoder_(decoder), protocol_(protocol), service_(service) {}

  // ---- the client's side

  void hear(Outgoing& outgoing) override;
  size_t answer(std::span<std::byte> window) override;
  bool wants_turn() const override;

  // ---- the shard's: for whoever drives its policy

  // What came that is not for data alone, to be dealt with before anything else is heard; null: nothing. Throws what the
  // client did wrong, once.
  std::shared_ptr<Frame> take_event();
  // Whether the client has something to receive.
  bool has_answers() const { return !answers_.empty(); }
  // In order with what the protocol does.
  void reply(Replies::Parts parts);

 private:
  bool is_held() const { return event_ != nullptr || failure_ != nullptr; }
  void serve();
  void take_answers();

  const std::shared_ptr<const void> owner_;
  FrameDecoder& decoder_;
  ServerProtocol& protocol_;
  const DataService& service_;
  std::shared_ptr<Frame> event_;
  std::exception_ptr failure_;
  Replies::Parts answers_;
  size_t answered_bytes_ = 0;  // of the first of them
};

}  // namespace psstore
