#include "serve/pump.h"

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
constexpr Pump::Id kTimerId = std::numeric_limits<Pump::Id>::max();

constexpr int kForever = -1;

[[noreturn]] void throw_system_error(const char* call) {
  throw std::system_error(errno, std::generic_category(), call);
}

}  // namespace

Pump::Pump(Desk& desk, int bell, std::chrono::nanoseconds busy)
    : desk_(desk),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      timer_(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)),
      bell_(bell),
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

void Pump::add(Id id, Descriptor socket, FrameDecoder& decoder, Port& port) {
  Link link(std::move(socket), decoder, port);
  epoll_event event{};
  event.events = link.awaited();
  event.data.u64 = id;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, link.fd(), &event) != 0) {
    throw_system_error("epoll_ctl");
  }
  links_.emplace(id, Watched{std::move(link), event.events});
}

void Pump::send(Id id, Replies::Parts parts) {
  Watched& watched = links_.at(id);
  watched.link.send(std::move(parts));
  watch(id, watched);
}

void Pump::close(Id id) {
  Watched& watched = links_.at(id);
  watched.link.close();
  watch(id, watched);
}

std::vector<Pump::Id> Pump::stalled(Clock::duration limit) const {
  const auto before = Clock::now() - limit;
  std::vector<Id> ids;
  for (const auto& [id, watched] : links_) {
    const auto since = watched.link.stalled_since();
    if (since && *since <= before) ids.push_back(id);
  }
  return ids;
}

std::vector<Pump::Id> Pump::unread(Clock::duration limit) {
  std::vector<Id> ids;
  for (auto& [id, watched] : links_) {
    if (watched.link.is_unread_for(limit)) ids.push_back(id);
  }
  return ids;
}

void Pump::watch(Id id, Watched& watched) {
  const uint32_t awaited = watched.link.awaited();
  if (awaited == std::exchange(watched.awaited, awaited)) return;
  epoll_event event{};
  event.events = awaited;
  event.data.u64 = id;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, watched.link.fd(), &event) != 0) {
    throw_system_error("epoll_ctl");
  }
}

// ---- turns ------------------------------------------------------------------------------------------

std::optional<Pump::Event> Pump::turn(Clock::duration linger) {
  const auto until = Clock::now() + linger;
  std::optional<Event> event;
  if (ready_.empty()) collect(0);
  do {
    while (!ready_.empty() && !event) {
      event = serve();
      deliver();
      if (!event) ready_.pop_front();
    }
  } while (!event && !desk_.has_left_over() && wait(until));
  if (timer_at_) set_timer(std::nullopt);
  return event;
}

void Pump::collect(int timeout_ms) {
  std::array<epoll_event, kMaxReady> events;
  const int found = epoll_wait(epoll_.get(), events.data(), kMaxReady, timeout_ms);
  const auto all = std::span(events).first(static_cast<size_t>(std::max(found, 0)));
  const auto end = std::remove_if(
      all.begin(), all.end(), [](const epoll_event& event) { return event.data.u64 == kTimerId; });
  if (end != all.end()) timer_at_.reset();
  for (const epoll_event& event : choose({all.begin(), end})) {
    const Id id = event.data.u64;  // the event is packed
    links_.at(id).link.begin_round(event.events);
    ready_.push_back(id);
  }
}

std::span<epoll_event> Pump::choose(std::span<epoll_event> ready) {
  const auto of = [this](const epoll_event& event) -> Watched& {
    const Id id = event.data.u64;
    return links_.at(id);
  };
  // Who had little to say the last time goes first, and then who has waited for longest.
  std::ranges::stable_sort(ready, {}, [&](const epoll_event& event) {
    const Watched& watched = of(event);
    return watched.link.moved_bulk() ? std::pair(kRoundBytes, watched.bulk_round)
                                     : std::pair(watched.link.num_read(), uint64_t{0});
  });
  std::array<bool, 2> has_one{};  // of those that are sent to, and of the others
  size_t num_chosen = 0;
  for (const epoll_event& event : ready) {
    Watched& watched = of(event);
    if (watched.link.moved_bulk()) {
      if (std::exchange(has_one[watched.link.mostly_sent() ? 0 : 1], true)) continue;
      watched.bulk_round = ++bulk_rounds_;
    }
    ready[num_chosen++] = event;
  }
  return ready.first(num_chosen);
}

std::optional<Pump::Event> Pump::serve() {
  const Id id = ready_.front();
  const auto found = links_.find(id);
  if (found == links_.end()) return std::nullopt;  // dropped since
  Watched& watched = found->second;
  std::optional<Event> event = serve(id, watched.link);
  if (!event && watched.link.over()) {
    event = Event{id, Gone{watched.link.error()}};
    links_.erase(found);
  } else {
    watch(id, watched);
  }
  return event;
}

std::optional<Pump::Event> Pump::serve(Id id, Link& link) {
  try {
    if (std::shared_ptr<Frame> frame = link.next_frame()) return Event{id, std::move(frame)};
    return std::nullopt;
  } catch (const std::exception&) {
    return Event{id, std::current_exception()};
  }
}

void Pump::deliver() {
  for (auto& [id, replies] : desk_.take_deliveries()) {
    if (links_.contains(id)) send(id, replies.take());
  }
}

bool Pump::wait(Clock::time_point until) {
  const auto left = until - Clock::now();
  if (busy_ > Clock::duration::zero() && left > Clock::duration::zero()) {
    const auto asked = std::min<std::chrono::nanoseconds>(busy_, left);
    std::array<pollfd, 2> files{{{epoll_.get(), POLLIN, 0}, {bell_, POLLIN, 0}}};
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

void Pump::set_timer(std::optional<Clock::time_point> at) {
  const auto since = at.value_or(Clock::time_point{}).time_since_epoch();
  const auto seconds = std::chrono::floor<std::chrono::seconds>(since);
  const itimerspec once{
      .it_interval = {},
      .it_value = {.tv_sec = seconds.count(), .tv_nsec = (since - seconds).count()}};
  timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &once, nullptr);
  timer_at_ = at;
}

}  // namespace psstore
