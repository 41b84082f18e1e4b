// Waiting for files without sleeping, for as long as that is worth a processor.
//
// A thread that sleeps is woken some 5 µs after something came, and much later where an idle processor
// has gone to sleep, too; one that asks again and again finds it at once, and has the processor to itself.
#pragma once

#include <poll.h>

#include <chrono>
#include <span>

namespace psstore {

// poll(2), asking without a pause for `busy` of the `timeout`, and sleeping for the rest of it.
// Returns how many of the files are ready; 0 if none is by then; -1 with errno.
int poll_busily(std::span<pollfd> files, std::chrono::nanoseconds timeout,
                std::chrono::nanoseconds busy);

}  // namespace psstore
