"""A listening socket on an event loop."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable

from psstore.net.limits import ACCEPT_AGAIN_S, ACCEPTS_PER_TURN, BACKLOG

_log = logging.getLogger("psstore.server")

NOT_OURS = (errno.EAGAIN, errno.EINTR, errno.ECONNABORTED, errno.EPERM, errno.EPROTO)
"""There is nobody, or whoever was there is gone or kept out by a firewall; accept(2) names networks' errors, too."""


class Listener:
    """Calls `accepted` with each connection and its peer's address, until it is closed."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        accepted: Callable[[socket.socket, str], None],
        *,
        per_turn: int = ACCEPTS_PER_TURN,
    ) -> None:
        """`per_turn`: how many are accepted before those that are there have a turn."""
        self._loop = loop
        self._per_turn = per_turn
        self._socket = sock
        self._accepted = accepted
        self._again: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        sock.listen(BACKLOG)
        loop.add_reader(sock.fileno(), self._accept)

    def close(self) -> None:
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()

    def _accept(self) -> None:
        for _ in range(self._per_turn):
            try:
                sock, name = self._socket.accept()
            except OSError as error:
                if error.errno not in NOT_OURS:
                    self._wait(error)
                return
            self._accepted(sock, _address(name))

    def _wait(self, error: OSError) -> None:
        """Pauses accepting for want of files or memory, which may be there again when others have gone."""
        _log.error("can't accept connections, next try in %g s: %s", ACCEPT_AGAIN_S, error)
        self._loop.remove_reader(self._socket.fileno())
        self._again = self._loop.call_later(ACCEPT_AGAIN_S, self._loop.add_reader, self._socket.fileno(), self._accept)


def _address(name: object) -> str:
    """'host:port'; a unix socket's peer has no name."""
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "unix socket"
