"""Every limit of the sockets, with its unit and its reason. What one frame may say is in csrc/wire/limits.h."""

from __future__ import annotations

from dataclasses import dataclass

WRITE_HIGH_BYTES = 1 << 20
"""Unsent bytes of a connection at which the server stops reading from it and working for it. 1 MiB keeps a link
of 10 Gbit/s busy for 0.8 ms, longer than it takes to wake up and answer the next request. What is unsent holds
references to values, no copies, and exceeds this by one reply at most."""

WRITE_LOW_BYTES = WRITE_HIGH_BYTES // 4
"""Unsent bytes at which it goes on: early enough that the socket does not run dry meanwhile."""

READ_BYTES = 256 << 10
"""What is read of one connection before the others have a turn, some 60 µs of copying: a small request waits for so
much of each connection that sends in bulk."""

BACKLOG = 1024
"""Connections that wait to be accepted: a whole fleet may connect in the same instant."""

DISCARD_BYTES = 64 << 10
"""Scratch memory into which the last bytes of a closing connection are read, shared by all of them."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """What one shard grants its peers; tests tighten them."""

    max_connections: int = 4096
    """Each holds a file descriptor and a receive buffer of 64 KiB: 256 MiB if all are used."""
    stalled_frame_s: float = 30.0
    """A peer that sends nothing for so long in the middle of a frame is gone or hostile: TCP itself retries a lost
    segment about seven times in that time (RFC 6298, doubling from 0.2 s)."""
    linger_s: float = 5.0
    """How long a connection that is being closed may take to receive the rest, before it is cut off."""
