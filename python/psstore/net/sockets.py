"""What every stream socket of psstore is set to, on both sides."""

from __future__ import annotations

import socket
from typing import Protocol

from psstore.net.limits import UNIX_BUFFER_BYTES

KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""A peer whose machine is gone is noticed after 60 s of silence, not after Linux's two hours. Not every system has
all of them."""


class _Options(Protocol):
    """A socket, or what an event loop shows of one."""

    @property
    def family(self) -> int: ...
    def setsockopt(self, level: int, option: int, value: int, /) -> None: ...


def tune(sock: _Options) -> None:
    """Small frames leave at once; dead peers are noticed; unix sockets hold a large piece of a payload."""
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, UNIX_BUFFER_BYTES)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
