#include "client/link.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

namespace psstore {
namespace {

// Linux's UIO_MAXIOV: pieces of one sendmsg.
constexpr size_t kMaxPieces = 1024;

bool would_block(int error) {
  return error == EAGAIN || error == EWOULDBLOCK || error == EINTR;
}

}  // namespace

bool ClientLink::send(Outgoing& outgoing) const {
  while (!outgoing.done()) {
    const std::span<const iovec> pieces = outgoing.pieces();
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(pieces.data());  // only read
    message.msg_iovlen = std::min(pieces.size(), kMaxPieces);
    const ssize_t taken = sendmsg(fd_, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (taken < 0) return would_block(errno);
    outgoing.sent(static_cast<size_t>(taken));
  }
  return true;
}

std::optional<size_t> ClientLink::receive(std::span<std::byte> window, bool may_sleep) const {
  const ssize_t received = recv(fd_, window.data(), window.size(), may_sleep ? 0 : MSG_DONTWAIT);
  if (received > 0) return static_cast<size_t>(received);
  if (received < 0 && would_block(errno)) return 0;
  return std::nullopt;
}

}  // namespace psstore
