"""Every limit of the sockets, with its unit and its reason. What one frame may say is in csrc/wire/limits.h."""

from __future__ import annotations

from dataclasses import dataclass

SMALL_WRITE_BYTES = 64 << 10
"""Frames of a client that are fewer together wait for the next one, if there is one, and go out with it."""

BACKLOG = 1024
"""Connections that wait to be accepted: a whole fleet may connect in the same instant."""

ACCEPTS_PER_TURN = 64
"""Connections that are accepted before those that are there have a turn."""

ACCEPT_AGAIN_S = 1.0
"""Pause after the system has refused a connection for want of files or memory, until it is asked again."""

EVENTS_PER_TURN = 64
"""Frames that Python has to handle before timers and others of the event loop have a turn."""

LINGER_S = 0.001
"""How long a turn may take if only ordinary requests come: all else that the event loop has to do waits for so long."""


RELEASE_S = 1.0
"""How long a client waits for a request that takes along what it has read in shared memory, before it says that alone.
Longer than the steps that would notice another word; what is held for it meanwhile is at most what it has pulled."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """What one shard grants its peers; tests tighten them."""

    max_connections: int = 4096
    """Each holds a file descriptor and a receive buffer of 64 KiB: 256 MiB if all are used."""
    stalled_frame_s: float = 30.0
    """A peer that sends nothing for so long in the middle of a frame is gone or hostile: TCP itself retries a lost
    segment about seven times in that time (RFC 6298, doubling from 0.2 s)."""
    unused_bytes: int = 8 << 20
    """Memory given back to the system at a time, of what was needed once and is not any more; a 32nd of that if it is
    more. Four times in `stalled_frame_s`, each time for a few milliseconds, in which nobody is served. After a burst
    half of what a shard kept for reuse is gone in three minutes."""
    lease_s: float = 600.0
    """How long a value may be read in shared memory. Longer than anybody reads who is not stuck, or has forgotten to
    say that it is done: its connection is cut, which tells it that values may have changed."""
    unread_s: float = 30.0
    """A peer that reads nothing for so long of what it is owed is cut off. Until then that is kept for it: 256 KiB and
    one reply (csrc/server/replies.h)."""
    linger_s: float = 5.0
    """How long a connection that is being closed may take to receive the rest, before it is cut off."""
