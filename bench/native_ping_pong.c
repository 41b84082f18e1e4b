// The two ends of a ping-pong over a connected socket, without an interpreter: the limit of small calls.
//
// A request is so many bytes, and so is an answer; both ends block. Returns 0 when the other end is gone.
#include <stdint.h>
#include <sys/socket.h>
#include <sys/types.h>

static char bytes[1 << 16];

static int move(ssize_t (*one)(int, void *, size_t, int), int link, int64_t count) {
  while (count > 0) {
    const ssize_t moved = one(link, bytes, (size_t)count, 0);
    if (moved <= 0) return 0;
    count -= moved;
  }
  return 1;
}

static ssize_t send_some(int link, void *data, size_t count, int flags) {
  return send(link, data, count, flags | MSG_NOSIGNAL);
}

// REQUIRES: neither is larger than `bytes`.
int32_t native_ping_pong(int32_t link, int64_t sent, int64_t received) {
  return move(send_some, link, sent) && move(recv, link, received);
}
