// A client's requests and their answers on the way to a socket and from it.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>

#include "client/outgoing.h"
#include "tls/byte_stream.h"

namespace psstore {

// A shard of this process, as its client's link has it.
class LocalEnd {
 public:
  LocalEnd() = default;
  LocalEnd(const LocalEnd&) = delete;
  LocalEnd& operator=(const LocalEnd&) = delete;
  virtual ~LocalEnd() = default;

  // Hears all of it, unless whoever drives the shard has to deal with something first.
  virtual void hear(Outgoing& outgoing) = 0;
  // Writes what it has answered to the window. Returns how many bytes.
  virtual size_t answer(std::span<std::byte> window) = 0;
  // Whoever drives the two has something to do, be it to receive.
  virtual bool wants_turn() const = 0;
};

class ClientLink {
 public:
  // `fd`: a connected socket, which stays its opener's. A plain recv on it sleeps for a moment at most, as nobody can
  // end it. `tls`: null: bytes go as they are.
  void open(int fd, std::shared_ptr<TlsSession> tls) { stream_ = ByteStream(fd, std::move(tls)); }
  void open(std::shared_ptr<LocalEnd> shard) { local_ = std::move(shard); }
  void close() {
    stream_ = {};
    local_ = nullptr;
  }
  bool is_open() const { return fd() >= 0 || is_local(); }
  // The shard is of this process: what is sent is heard, and answered if it is data.
  bool is_local() const { return local_ != nullptr; }
  bool wants_turn() const { return is_local() && local_->wants_turn(); }
  int fd() const { return stream_.fd(); }
  const ByteStream& stream() const { return stream_; }

  // Hands the kernel, or the shard, what it takes. False: the connection is lost.
  bool send(Outgoing& outgoing);
  // The far end has closed the connection, whether what it sent before has been received or not. False of a session
  // without a socket.
  bool is_hung_up() const;
  // Returns how many bytes came, 0 if there is nothing now. Nullopt: the connection is lost. `may_sleep`: for a moment.
  // Throws TLS_FAILED.
  std::optional<size_t> receive(std::span<std::byte> window, bool may_sleep) const;

 private:
  ByteStream stream_;
  std::shared_ptr<LocalEnd> local_;  // null: there is a socket, or nothing
};

}  // namespace psstore
