#include "client/link.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "core/descriptor.h"

namespace psstore {
namespace {

// Linux's UIO_MAXIOV: pieces of one sendmsg.
constexpr size_t kMaxPieces = 1024;

}  // namespace

bool ClientLink::send(Outgoing& outgoing) {
  if (is_local()) {
    local_->hear(outgoing);
    return true;
  }
  while (!outgoing.done()) {
    const std::span<const iovec> pieces = outgoing.pieces();
    const ssize_t taken = stream_.send(pieces.first(std::min(pieces.size(), kMaxPieces)));
    if (taken < 0) return would_block(errno);
    outgoing.sent(static_cast<size_t>(taken));
  }
  return true;
}

bool ClientLink::is_hung_up() const {
  if (fd() < 0) return false;
  pollfd one{.fd = fd(), .events = POLLRDHUP, .revents = 0};
  return poll(&one, 1, 0) == 1;
}

std::optional<size_t> ClientLink::receive(std::span<std::byte> window, bool may_sleep) const {
  if (is_local()) return local_->answer(window);
  const ssize_t received = stream_.receive(window, may_sleep);
  if (received > 0) return static_cast<size_t>(received);
  if (received < 0 && would_block(errno)) return 0;
  return std::nullopt;
}

}  // namespace psstore
