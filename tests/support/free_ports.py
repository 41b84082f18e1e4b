"""Ports for servers that are told theirs, some of which end and come back at the same place."""

from __future__ import annotations

import contextlib
import random
import socket

PORTS = range(10_000, 20_000)
"""Below those that Linux gives to connections, and to servers that leave the choice to it: none of these gets one that
was free while it is not listened at."""


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that are free now, drawn so that tests side by side draw different ones."""
    found: list[int] = []
    with contextlib.ExitStack() as held:
        for port in random.SystemRandom().sample(PORTS, len(PORTS)):
            with contextlib.suppress(OSError):  # another's
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
                found.append(port)
            if len(found) == count:
                return found
    raise AssertionError(f"{PORTS} has no {count} free ports")


def consecutive_ports(count: int) -> int:
    """Draws a port of 127.0.0.1 that is free now, as are the `count` - 1 after it."""
    bases = range(PORTS.start, PORTS.stop - count, count)
    for base in random.SystemRandom().sample(bases, len(bases)):
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):  # one is another's
            for port in range(base, base + count):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return base
    raise AssertionError(f"{PORTS} has no {count} consecutive free ports")
