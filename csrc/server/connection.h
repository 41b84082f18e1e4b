// One connection's socket: bytes from it to its protocol, and the protocol's replies back, a round at a time.
//
//   socket ─► decoder ─► protocol ─► frames for others       A peer that does not read its replies is not read
//      ▲                  │                              from: what it can make us hold is what a protocol lets
//      └──── replies ◄────┘                              wait, one reply and one receive buffer.
//
// Which of the connections has a round, and when, is the poller's.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "core/descriptor.h"
#include "server/server_protocol.h"
#include "tls/byte_stream.h"
#include "wire/decoder.h"

namespace psstore {

// What is read of one connection in a round, and what is sent to it, some 60 µs of copying each. Without a bound a
// reader that keeps up with us would have all of its values before anybody else has a turn.
inline constexpr size_t kRoundBytes = 256u << 10;

// Who moved so much in a round moves bulk: others need not wait for all who do.
inline constexpr size_t kBulkBytes = 64u << 10;

class Connection {
 public:
  using Clock = std::chrono::steady_clock;

  // Decoder and protocol live as long as the connection. `tls`: null: bytes go as they are.
  Connection(Descriptor socket, std::shared_ptr<TlsSession> tls, FrameDecoder& decoder,
             ServerProtocol& protocol)
      : socket_(std::move(socket)),
        stream_(socket_.get(), std::move(tls)),
        decoder_(decoder),
        protocol_(protocol) {}

  int fd() const { return socket_.get(); }
  // The epoll events that it can do something with.
  uint32_t awaited() const;

  // ---- a round

  // Bytes that were moved in the last one.
  size_t num_read() const { return kRoundBytes - to_read_; }
  size_t num_sent() const { return kRoundBytes - to_send_; }
  bool moved_bulk() const { return std::max(num_read(), num_sent()) >= kBulkBytes; }
  bool mostly_sent() const { return num_sent() > num_read(); }
  // These epoll events have come.
  void begin_round(uint32_t events);
  // Goes on with the round. A frame: it is for others, and what they do about it comes before the next
  // call. Null: the round is over. Throws what the protocol throws.
  std::shared_ptr<Frame> next_frame();
  // Nothing will come any more, and nothing is to be sent.
  bool over() const { return ended_ && protocol_.replies().empty(); }
  // Why it ended; 0: the peer is done.
  int error() const { return error_; }

  // ---- what others say

  // After what is on its way already.
  void send(Replies::Parts parts);
  // What need not wait any longer.
  void go_on() { flush(); }
  // Ends the connection once all is sent. The peer's unread bytes are read and dropped until it closes, too:
  // closing over them would reset the connection, and lose the reply that says why.
  void close();
  // Since when nothing has come of a frame that has begun; empty: none has, or the delay is ours.
  std::optional<Clock::time_point> stalled_since() const;
  // Whether its peer has read nothing for so long of what it is owed, as far as those know who ask this now and then.
  bool is_unread_for(Clock::duration limit);

 private:
  // False: there is nothing more to read in this round.
  bool receive();
  // Sends what the round may still send. What is left the socket will call for.
  void flush();
  void send_free_bytes();
  void end(int error);

  Descriptor socket_;
  ByteStream stream_;
  FrameDecoder& decoder_;
  ServerProtocol& protocol_;
  bool readable_ = false;         // for all we know
  bool interrupted_ = false;      // frames may have been left when replies were to be sent first
  size_t to_read_ = kRoundBytes;  // that this round may still move
  size_t to_send_ = kRoundBytes;
  bool closing_ = false;   // nothing that comes matters any more
  bool told_end_ = false;  // the peer knows that nothing more will come
  bool mute_ = false;      // nothing can be sent any more
  bool ended_ = false;     // nothing can be received any more
  int error_ = 0;
  int64_t read_bytes_ = 0;  // of what the socket took, what is not in its queue
  std::optional<Clock::time_point> unread_since_;  // they are as many
  Clock::time_point came_at_{};                    // the latest bytes, or the latest of our delays
  Lap arriving_;                                   // a frame that has begun
  Lap leaving_;                                    // replies that the socket had no room for
};

}  // namespace psstore
