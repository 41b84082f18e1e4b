#include "server/poller.h"

#include <sys/timerfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <limits>
#include <span>
#include <system_error>
#include <utility>

#include "core/busy_poll.h"

namespace psstore {
namespace {

// Connections that are looked at before it is asked again who is ready.
constexpr int kMaxReady = 64;

// In place of a connection's.
constexpr Poller::Id kTimerId = std::numeric_limits<Poller::Id>::max();

constexpr int kForever = -1;

[[noreturn]] void throw_system_error(const char* call) {
  throw std::system_error(errno, std::generic_category(), call);
}

}  // namespace

Poller::Poller(DataService& service, int wakeup_fd, std::chrono::nanoseconds busy)
    : service_(service),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      timer_(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)),
      wakeup_fd_(wakeup_fd),
      busy_(busy) {
  if (epoll_.get() < 0) throw_system_error("epoll_create1");
  if (timer_.get() < 0) throw_system_error("timerfd_create");
  epoll_event event{};
  event.events = EPOLLIN | EPOLLET;  // so that it needs not be read
  event.data.u64 = kTimerId;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, timer_.get(), &event) != 0) {
    throw_system_error("epoll_ctl");
  }
}

// ---- connections ------------------------------------------------------------------------------------

void Poller::add(Id id, Descriptor socket, std::shared_ptr<TlsSession> tls, FrameDecoder& decoder,
                 ServerProtocol& protocol) {
  Connection connection(std::move(socket), std::move(tls), decoder, protocol);
  epoll_event event{};
  event.events = connection.awaited();
  event.data.u64 = id;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, connection.fd(), &event) != 0) {
    throw_system_error("epoll_ctl");
  }
  connections_.emplace(id, Watched{std::move(connection), event.events});
}

void Poller::send(Id id, Replies::Parts parts) {
  Watched& watched = connections_.at(id);
  watched.connection.send(std::move(parts));
  watch(id, watched);
}

void Poller::close(Id id) {
  Watched& watched = connections_.at(id);
  watched.connection.close();
  watch(id, watched);
}

std::vector<Poller::Id> Poller::stalled(Clock::duration limit) const {
  const auto before = Clock::now() - limit;
  std::vector<Id> ids;
  for (const auto& [id, watched] : connections_) {
    const auto since = watched.connection.stalled_since();
    if (since && *since <= before) ids.push_back(id);
  }
  return ids;
}

std::vector<Poller::Id> Poller::unread(Clock::duration limit) {
  std::vector<Id> ids;
  for (auto& [id, watched] : connections_) {
    if (watched.connection.is_unread_for(limit)) ids.push_back(id);
  }
  return ids;
}

void Poller::watch(Id id, Watched& watched) {
  const uint32_t awaited = watched.connection.awaited();
  const uint32_t before = std::exchange(watched.awaited, awaited);
  if (awaited == before) return;
  epoll_event event{};
  event.events = awaited;
  event.data.u64 = id;
  // Where nothing is awaited, an end would ring all the same, and again at once.
  const int change = awaited == 0 ? EPOLL_CTL_DEL : before == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
  if (epoll_ctl(epoll_.get(), change, watched.connection.fd(), &event) != 0) {
    throw_system_error("epoll_ctl");
  }
}

// ---- turns ------------------------------------------------------------------------------------------

std::optional<Poller::Event> Poller::turn(Clock::duration linger) {
  const auto until = Clock::now() + linger;
  std::optional<Event> event;
  deliver();
  if (ready_.empty()) collect(0);
  do {
    while (!ready_.empty() && !event) {
      event = serve();
      deliver();
      if (!event) ready_.pop_front();
    }
  } while (!event && !service_.has_failures() && wait(until));
  if (timer_at_) set_timer(std::nullopt);
  return event;
}

void Poller::collect(int timeout_ms) {
  std::array<epoll_event, kMaxReady> events;
  const int found = epoll_wait(epoll_.get(), events.data(), kMaxReady, timeout_ms);
  const auto all = std::span(events).first(static_cast<size_t>(std::max(found, 0)));
  const auto end = std::remove_if(
      all.begin(), all.end(), [](const epoll_event& event) { return event.data.u64 == kTimerId; });
  if (end != all.end()) timer_at_.reset();
  for (const epoll_event& event : choose({all.begin(), end})) {
    const Id id = event.data.u64;  // the event is packed
    connections_.at(id).connection.begin_round(event.events);
    ready_.push_back(id);
  }
}

std::span<epoll_event> Poller::choose(std::span<epoll_event> ready) {
  const auto of = [this](const epoll_event& event) -> Watched& {
    const Id id = event.data.u64;
    return connections_.at(id);
  };
  // Who had little to say the last time goes first, and then who has waited for longest.
  std::ranges::stable_sort(ready, {}, [&](const epoll_event& event) {
    const Watched& watched = of(event);
    return watched.connection.moved_bulk() ? std::pair(kRoundBytes, watched.bulk_round)
                                           : std::pair(watched.connection.num_read(), uint64_t{0});
  });
  std::array<bool, 2> has_one{};  // of those that are sent to, and of the others
  size_t num_chosen = 0;
  for (const epoll_event& event : ready) {
    Watched& watched = of(event);
    if (watched.connection.moved_bulk()) {
      if (std::exchange(has_one[watched.connection.mostly_sent() ? 0 : 1], true)) continue;
      watched.bulk_round = ++bulk_rounds_;
    }
    ready[num_chosen++] = event;
  }
  return ready.first(num_chosen);
}

std::optional<Poller::Event> Poller::serve() {
  const Id id = ready_.front();
  const auto found = connections_.find(id);
  if (found == connections_.end()) return std::nullopt;  // dropped since
  Watched& watched = found->second;
  std::optional<Event> event = serve(id, watched.connection);
  if (!event && watched.connection.over()) {
    event = Event{id, Gone{watched.connection.error()}};
    connections_.erase(found);
  } else {
    watch(id, watched);
  }
  return event;
}

std::optional<Poller::Event> Poller::serve(Id id, Connection& connection) {
  try {
    if (std::shared_ptr<Frame> frame = connection.next_frame()) return Event{id, std::move(frame)};
    return std::nullopt;
  } catch (const std::exception&) {
    return Event{id, std::current_exception()};
  }
}

void Poller::deliver() {
  for (auto& [id, replies] : service_.take_deliveries()) {
    if (connections_.contains(id)) send(id, replies.take());
  }
  for (const Id id : service_.replication().take_ready()) {
    const auto found = connections_.find(id);
    if (found == connections_.end()) continue;
    found->second.connection.go_on();
    watch(id, found->second);
  }
}

bool Poller::wait(Clock::time_point until) {
  const auto left = until - Clock::now();
  if (busy_ > Clock::duration::zero() && left > Clock::duration::zero()) {
    const auto asked = std::min<std::chrono::nanoseconds>(busy_, left);
    std::array<pollfd, 2> files{{{epoll_.get(), POLLIN, 0}, {wakeup_fd_, POLLIN, 0}}};
    if (poll_busily(files, asked, asked) > 0) {
      if (files[0].revents != 0) collect(0);
      return !ready_.empty();
    }
  }
  if (Clock::now() >= until) return false;
  if (!timer_at_) set_timer(until);
  collect(kForever);
  return !ready_.empty();
}

void Poller::set_timer(std::optional<Clock::time_point> at) {
  const auto since = at.value_or(Clock::time_point{}).time_since_epoch();
  const auto seconds = std::chrono::floor<std::chrono::seconds>(since);
  const itimerspec once{
      .it_interval = {},
      .it_value = {.tv_sec = seconds.count(), .tv_nsec = (since - seconds).count()}};
  timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &once, nullptr);
  timer_at_ = at;
}

}  // namespace psstore
