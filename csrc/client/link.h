// A client's requests and their answers on the way to a socket and from it.
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "client/outgoing.h"
#include "tls/byte_stream.h"

namespace psstore {

class ClientLink {
 public:
  // `fd`: a connected socket, which stays its opener's. A plain recv on it sleeps for a moment at most, as nobody can
  // end it. `tls`: null: bytes go as they are.
  void open(int fd, std::shared_ptr<TlsSession> tls) { stream_ = ByteStream(fd, std::move(tls)); }
  void close() { stream_ = {}; }
  bool is_open() const { return fd() >= 0; }
  int fd() const { return stream_.fd(); }
  const ByteStream& stream() const { return stream_; }

  // Hands the kernel what it takes. False: the connection is lost.
  bool send(Outgoing& outgoing);
  // The far end has closed the connection, whether what it sent before has been received or not. False of a session
  // without a socket.
  bool is_hung_up() const;
  // Returns how many bytes came, 0 if there is nothing now. Nullopt: the connection is lost. `may_sleep`: for a moment.
  // Throws TLS_FAILED.
  std::optional<size_t> receive(std::span<std::byte> window, bool may_sleep) const;

 private:
  ByteStream stream_;
};

}  // namespace psstore
