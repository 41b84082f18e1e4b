// The one place where a client's requests and their answers meet a socket.
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "client/outgoing.h"

namespace psstore {

class ClientLink {
 public:
  // `fd`: a connected socket, which stays its opener's. A plain recv on it sleeps for a moment at most, as nobody can
  // end it.
  void open(int fd) { fd_ = fd; }
  void close() { fd_ = -1; }
  bool is_open() const { return fd_ >= 0; }
  int fd() const { return fd_; }

  // Hands the kernel what it takes. False: the connection is lost.
  bool send(Outgoing& outgoing) const;
  // Returns how many bytes came, 0 if there is nothing now. Nullopt: the connection is lost. `may_sleep`: for a moment.
  std::optional<size_t> receive(std::span<std::byte> window, bool may_sleep) const;

 private:
  int fd_ = -1;
};

}  // namespace psstore
