#include "client/outgoing.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

namespace psstore {
namespace {

// Linux's UIO_MAXIOV: pieces of one sendmsg.
constexpr size_t kMaxPieces = 1024;

}  // namespace

void Outgoing::add(std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  auto* const data = const_cast<std::byte*>(bytes.data());  // only read
  if (!done()) {
    // Slices of one tensor lie side by side: one piece.
    iovec& last = pieces_.back();
    if (static_cast<std::byte*>(last.iov_base) + last.iov_len == data) {
      last.iov_len += bytes.size();
      return;
    }
  }
  pieces_.push_back({data, bytes.size()});
}

bool Outgoing::send(int fd) {
  while (!done()) {
    msghdr message{};
    message.msg_iov = pieces_.data() + first_;
    message.msg_iovlen = std::min(pieces_.size() - first_, kMaxPieces);
    const ssize_t taken = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (taken < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
    auto sent = static_cast<size_t>(taken);
    while (!done() && sent >= pieces_[first_].iov_len) sent -= pieces_[first_++].iov_len;
    if (sent > 0) {
      iovec& piece = pieces_[first_];
      piece.iov_base = static_cast<std::byte*>(piece.iov_base) + sent;
      piece.iov_len -= sent;
    }
  }
  return true;
}

}  // namespace psstore
