// What is to be written to a connection, in order, from where it lies.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <span>
#include <vector>

namespace psstore {

class Outgoing {
 public:
  // The bytes stay as they are until they are sent, or this is gone.
  void add(std::span<const std::byte> bytes);
  // Hands the kernel what it takes. False: the connection is lost.
  bool send(int fd);

  bool done() const { return first_ == pieces_.size(); }
  // What is still to be sent.
  std::span<const iovec> pieces() const { return std::span(pieces_).subspan(first_); }

 private:
  std::vector<iovec> pieces_;
  size_t first_ = 0;  // not wholly sent
};

}  // namespace psstore
