#include "client/drive.h"

#include <algorithm>
#include <climits>
#include <vector>

#include "core/busy_poll.h"

namespace psstore {
namespace {

using Clock = std::chrono::steady_clock;
using Sessions = std::span<ClientSession* const>;

// False: it is for whoever drives the session to go on.
bool receive(ClientSession& session, bool may_sleep) {
  try {
    return session.receive(INT_MAX, may_sleep) == ClientSession::Received::kAll;
  } catch (const Error&) {
    return false;  // the session says it again to whoever goes on
  }
}

// An answer that comes before its request is sent is not the end: the next frame would follow half of one.
bool all_quiet(Sessions sessions) {
  return std::ranges::all_of(sessions, &ClientSession::is_quiet);
}

// Most answers are small and here soon: then this is one system call, of one file, in place of two, of two.
bool sleep_in_recv(Sessions sessions) {
  for (ClientSession* const session : sessions) {
    if (!session->is_free()) break;
    const size_t before = session->requests().size();
    if (before == 0) continue;
    if (!receive(*session, /*may_sleep=*/true)) return false;
    if (session->requests().size() == before) break;  // so it was not soon
  }
  return true;
}

// False at once where a shard is of this process: it has answered what it can.
bool wait(Sessions sessions, int wakeup_fd, std::chrono::nanoseconds busy) {
  const auto is_local = [](const ClientSession* session) { return session->link().is_local(); };
  if (std::ranges::any_of(sessions, is_local)) return false;
  std::vector<pollfd> files;
  files.reserve(sessions.size() + 1);
  for (const ClientSession* const session : sessions) {
    const int events = session->awaits_room() ? POLLIN | POLLOUT : POLLIN;
    files.push_back({session->link().fd(), static_cast<short>(events), 0});
  }
  files.push_back({wakeup_fd, POLLIN, 0});
  const int found = poll_busily(files, kQuiet, busy);
  if (found <= 0 || files.back().revents != 0) return false;
  for (size_t i = 0; i < sessions.size(); ++i) {
    const int events = files[i].revents;
    if ((events & POLLOUT) != 0 && !sessions[i]->send()) return false;
    if ((events & ~POLLOUT) != 0 && !receive(*sessions[i], /*may_sleep=*/false)) return false;
  }
  return true;
}

}  // namespace

bool drive(Sessions sessions, int wakeup_fd, std::chrono::nanoseconds busy) {
  const auto end = Clock::now() + kLongestDrive;
  for (ClientSession* const session : sessions) {
    if (!session->send()) return false;
  }
  if (busy <= busy.zero() && !sleep_in_recv(sessions)) return false;
  while (!all_quiet(sessions)) {
    if (!wait(sessions, wakeup_fd, busy) || Clock::now() > end) return false;
  }
  return true;
}

}  // namespace psstore
