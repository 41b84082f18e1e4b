#include "server/connection.h"

#include <linux/sockios.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>
#include <vector>

namespace psstore {
namespace {

// Ranges of one sendmsg: 256 KiB of replies have fewer, as each is of kOwnReplyPieceBytes or beside one.
constexpr size_t kMaxRanges = 64;

// Where the last bytes of closing connections go; read by nobody.
constexpr size_t kDiscardBytes = 64u << 10;

double seconds(Connection::Clock::time_point time) {
  return std::chrono::duration<double>(time.time_since_epoch()).count();
}

// Cuts `ranges` off after so many bytes. Returns how many ranges are left.
size_t first_bytes(std::span<iovec> ranges, size_t num_bytes) {
  for (size_t i = 0; i < ranges.size(); ++i) {
    if (ranges[i].iov_len >= num_bytes) {
      ranges[i].iov_len = num_bytes;
      return i + 1;
    }
    num_bytes -= ranges[i].iov_len;
  }
  return ranges.size();
}

// What the socket has taken, and its peer has not. A socket may take more while its peer reads nothing: its
// buffer grows.
int64_t queued_bytes(int fd) {
  int num_bytes = 0;
  return ioctl(fd, SIOCOUTQ, &num_bytes) == 0 ? num_bytes : 0;
}

}  // namespace

uint32_t Connection::awaited() const {
  const bool reading = !ended_ && (closing_ || !protocol_.is_shut());
  const bool sending = protocol_.replies().num_free_bytes() != 0 && !stream_.awaits_peer();
  // What is here already rings no bell: that there is room to send does, nearly always.
  const bool was_left = interrupted_ && !protocol_.is_shut();
  const bool goes_on = reading && (stream_.holds_bytes() || was_left);
  return (reading ? EPOLLIN : 0u) | (sending || goes_on ? EPOLLOUT : 0u);
}

std::optional<Connection::Clock::time_point> Connection::stalled_since() const {
  if (closing_ || ended_ || protocol_.is_shut() || !decoder_.mid_frame()) return std::nullopt;
  return came_at_;
}

bool Connection::is_unread_for(Clock::duration limit) {
  flush();  // the delay may be ours
  if (protocol_.replies().num_free_bytes() == 0) {
    unread_since_.reset();
    return false;
  }
  const int64_t read_bytes = stream_.num_sent() - queued_bytes(fd());
  if (unread_since_ && read_bytes <= read_bytes_) return Clock::now() - *unread_since_ >= limit;
  read_bytes_ = read_bytes;
  unread_since_ = Clock::now();
  return false;
}

// ---- a round ----------------------------------------------------------------------------------------

void Connection::begin_round(uint32_t events) {
  readable_ = (events & ~static_cast<uint32_t>(EPOLLOUT)) != 0 ||
              stream_.holds_bytes();  // an error is read, too
  to_read_ = to_send_ = kRoundBytes;
  if (protocol_.is_shut()) came_at_ = Clock::now();
  flush();
}

std::shared_ptr<Frame> Connection::next_frame() {
  do {
    while (!closing_ && !protocol_.is_shut()) {
      std::shared_ptr<Frame> frame = protocol_.next_frame(seconds(came_at_));
      if (frame == nullptr && !protocol_.is_shut()) break;
      flush();
      if (frame != nullptr) return frame;
    }
  } while (receive());
  // If it is full, the socket was just so, too, or the round has sent its share, or replies wait for standbys. Once there
  // is room, frames may go on that wait in the protocol: that is a round, and the socket will call for it.
  interrupted_ = protocol_.is_shut();
  if (!interrupted_) flush();
  const bool arriving = !closing_ && !ended_ && !protocol_.is_shut() && decoder_.mid_frame();
  if (arriving != arriving_.runs()) {
    // It began with the latest bytes, or is whole since they came.
    if (arriving) {
      arriving_.begin(protocol_.client().traffic, Activity::kPush, seconds(came_at_));
    } else {
      arriving_.end(seconds(came_at_));
    }
  }
  return nullptr;
}

bool Connection::receive() {
  if (!readable_ || ended_ || to_read_ == 0 || (protocol_.is_shut() && !closing_)) return false;
  std::array<std::byte, kDiscardBytes> discarded;
  std::span<std::byte> window = closing_ ? discarded : decoder_.writable().bytes;
  window = window.first(std::min(window.size(), to_read_));
  const ssize_t received = stream_.receive(window, /*may_sleep=*/false);
  if (received < 0 && would_block(errno)) return readable_ = false;
  if (received <= 0) {
    end(received < 0 ? errno : 0);
    return false;
  }
  const auto num_bytes = static_cast<size_t>(received);
  if (!closing_) decoder_.written(num_bytes);
  readable_ = num_bytes == window.size();  // else that was all
  to_read_ -= num_bytes;
  came_at_ = Clock::now();
  return true;
}

void Connection::end(int error) {
  ended_ = true;
  error_ = error;
  if (error != 0) protocol_.replies().clear();
}

// ---- what goes out ----------------------------------------------------------------------------------

void Connection::send(Replies::Parts parts) {
  Replies& replies = protocol_.replies();
  const bool first = replies.empty();
  replies.add(std::move(parts));
  if (first) flush();
}

void Connection::close() {
  closing_ = true;
  flush();
}

void Connection::flush() {
  send_free_bytes();
  const bool leaving = protocol_.replies().num_free_bytes() != 0;
  if (leaving == leaving_.runs()) return;
  if (leaving) {
    leaving_.begin(protocol_.client().traffic, Activity::kPull, seconds(Clock::now()));
  } else {
    leaving_.end(seconds(Clock::now()));
  }
}

void Connection::send_free_bytes() {
  Replies& replies = protocol_.replies();
  std::array<iovec, kMaxRanges> ranges;
  while (!replies.empty() && !mute_) {
    const size_t num_bytes = std::min(to_send_, replies.num_free_bytes());
    if (num_bytes == 0) return;
    const std::span<iovec> all = std::span(ranges).first(replies.ranges(ranges));
    const ssize_t taken = stream_.send(all.first(first_bytes(all, num_bytes)));
    if (taken < 0 && would_block(errno)) return;
    mute_ = taken < 0;
    if (mute_) break;
    replies.sent(static_cast<size_t>(taken));
    // Of what was offered in an earlier round there may be more than this one may still send.
    to_send_ -= std::min(to_send_, static_cast<size_t>(taken));
  }
  if (mute_) replies.clear();  // why is told by what is read
  if (closing_ && !std::exchange(told_end_, true)) stream_.shut_down();
}

}  // namespace psstore
