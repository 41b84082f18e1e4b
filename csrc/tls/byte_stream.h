// The one place where a connection's bytes meet its socket, on both sides: plain, or encrypted.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "tls/session.h"

namespace psstore {

class ByteStream {
 public:
  ByteStream() = default;
  // `fd`: a connected socket, somebody else's. `tls`: null: bytes go as they are.
  explicit ByteStream(int fd, std::shared_ptr<TlsSession> tls = nullptr)
      : fd_(fd), tls_(std::move(tls)) {}

  int fd() const { return fd_; }
  const std::shared_ptr<TlsSession>& tls() const { return tls_; }

  // As sendmsg(2), which never waits. What was not taken is to be offered again, before all else.
  ssize_t send(std::span<const iovec> ranges) {
    if (tls_ != nullptr) return tls_->send(fd_, ranges);
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(ranges.data());  // only read
    message.msg_iovlen = ranges.size();
    const ssize_t taken = sendmsg(fd_, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (taken > 0) num_sent_ += taken;
    return taken;
  }
  // As recv(2): a window that is not filled was all that there is now. Throws TLS_FAILED, see TlsSession.
  ssize_t receive(std::span<std::byte> window, bool may_sleep) const {
    if (tls_ != nullptr) return tls_->receive(fd_, window, may_sleep);
    return recv(fd_, window.data(), window.size(), may_sleep ? 0 : MSG_DONTWAIT);
  }
  // Nothing more will be sent.
  void shut_down() const {
    if (tls_ != nullptr) tls_->say_end(fd_);
    shutdown(fd_, SHUT_WR);
  }
  // See TlsSession: what a poll of the socket does not tell.
  bool holds_bytes() const { return tls_ != nullptr && tls_->holds_bytes(); }
  bool awaits_peer() const { return tls_ != nullptr && tls_->awaits_peer(); }
  // Bytes that the socket took.
  int64_t num_sent() const { return tls_ != nullptr ? tls_->num_sent() : num_sent_; }

 private:
  int fd_ = -1;
  std::shared_ptr<TlsSession> tls_;
  int64_t num_sent_ = 0;
};

}  // namespace psstore
