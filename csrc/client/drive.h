// Waits for answers without Python, for a caller that waits for just these.
#pragma once

#include <chrono>
#include <span>

#include "client/session.h"

namespace psstore {

// Nothing for so long: the wait is one for other workers, or for a lost shard, and not for a reply.
inline constexpr std::chrono::milliseconds kQuiet{10};
// Whoever shares the connections is not kept longer than this, however much is under way.
inline constexpr std::chrono::milliseconds kLongestDrive{1000};

// Sends what the sessions have to say, and receives, until all that is asked of them is answered; or until something is
// to be done by whoever drives them otherwise: another frame came, a connection ended, `wakeup_fd` became readable, a
// signal, nothing for a while. True: all is answered. `busy`: how long it asks for each answer before it sleeps.
bool drive(std::span<ClientSession* const> sessions, int wakeup_fd, std::chrono::nanoseconds busy);

}  // namespace psstore
