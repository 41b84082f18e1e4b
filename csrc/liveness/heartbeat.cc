#include "liveness/heartbeat.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "core/errors.h"

namespace psstore {
namespace {

// Longer is no heartbeat: the store gives a silent worker up long before.
constexpr double kMaxIntervalSeconds = 3600;

[[noreturn]] void throw_errno(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

void check_socket(int fd) {
  int type = 0;
  socklen_t length = sizeof type;
  if (::getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) != 0 || type != SOCK_STREAM) {
    throw Error(ErrorCode::BAD_ARGUMENT,
                "heartbeat: file descriptor " + std::to_string(fd) + " is not a stream socket");
  }
}

std::chrono::steady_clock::duration checked_interval(double seconds) {
  if (!(seconds > 0 && seconds <= kMaxIntervalSeconds)) {  // NaN fails too
    throw Error(ErrorCode::BAD_ARGUMENT, "heartbeat: an interval of " + std::to_string(seconds) +
                                             " s, expected more than 0 and at most 3600");
  }
  return std::chrono::ceil<std::chrono::steady_clock::duration>(
      std::chrono::duration<double>(seconds));
}

// Blocks every signal while it lives. A thread started meanwhile inherits that for good: signals are for
// the interpreter's threads, and a write to a closed connection is an error code, not SIGPIPE.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

void Heartbeat::Descriptor::close() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

Heartbeat::Heartbeat(int fd, std::string frame, double interval_s, std::shared_ptr<TlsSession> tls)
    : owner_(::getpid()), frame_(std::move(frame)), interval_(checked_interval(interval_s)) {
  check_socket(fd);
  if (frame_.empty()) throw Error(ErrorCode::BAD_ARGUMENT, "heartbeat: the frame is empty");
  socket_.open(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (socket_.get() < 0) throw_errno("heartbeat: duplicating the socket");
  stream_ = ByteStream(socket_.get(), std::move(tls));
  int wake[2];
  if (::pipe2(wake, O_CLOEXEC) != 0) throw_errno("heartbeat: making a pipe");
  wake_read_.open(wake[0]);
  wake_write_.open(wake[1]);
  const SignalsBlocked blocked;
  thread_ = std::make_unique<std::thread>([this] { beat_until_stopped(); });
}

bool Heartbeat::alive() const {
  return alive_.load() && ::getpid() == owner_;
}

void Heartbeat::stop() {
  if (::getpid() == owner_) {
    const MutexLock lock(stopping_);
    if (thread_ == nullptr) return;
    const char wake = 0;
    while (::write(wake_write_.get(), &wake, 1) < 0 && errno == EINTR) {
    }
    thread_->join();
    thread_.reset();
  } else {
    // The thread stayed in the parent: its handle can be neither joined nor destroyed here.
    static_cast<void>(thread_.release());
  }
  socket_.close();
  wake_read_.close();
  wake_write_.close();
}

void Heartbeat::beat_until_stopped() {
  Clock::time_point next_beat = Clock::now();
  size_t sent = frame_.size();
  do {
    const Clock::time_point now = Clock::now();
    if (sent == frame_.size() && now >= next_beat) {
      sent = 0;
      next_beat = std::max(next_beat + interval_, now);  // missed beats are not made up for
    }
    if (sent < frame_.size() && !send_some(sent)) break;
  } while (wait(sent < frame_.size(), next_beat));
  alive_.store(false);
}

bool Heartbeat::send_some(size_t& sent) {
  const iovec left{const_cast<char*>(frame_.data()) + sent, frame_.size() - sent};  // only read
  const ssize_t written = stream_.send(std::span(&left, 1));
  if (written >= 0) {
    sent += static_cast<size_t>(written);
    return true;
  }
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

bool Heartbeat::wait(bool under_way, Clock::time_point next_beat) const {
  pollfd polled[2] = {{socket_.get(), static_cast<short>(under_way ? POLLOUT : 0), 0},
                      {wake_read_.get(), POLLIN, 0}};
  int timeout_ms = -1;  // a beat under way waits for room as long as it takes
  if (!under_way) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(next_beat - Clock::now());
    timeout_ms = static_cast<int>(std::max<std::chrono::milliseconds::rep>(left.count(), 0));
  }
  if (::poll(polled, 2, timeout_ms) < 0) return errno == EINTR;
  const bool broken = (polled[0].revents & (POLLERR | POLLHUP | POLLNVAL)) != 0;
  const bool stopped = polled[1].revents != 0;
  return !broken && !stopped;
}

}  // namespace psstore
