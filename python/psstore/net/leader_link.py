"""A standby's connection to the shard that it follows: the one of a server's that it opened itself."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

from psstore import _core
from psstore.net.fd_client import see
from psstore.net.sockets import tune
from psstore.protocol.frames import Send
from psstore.protocol.handshake import ClientIdentity
from psstore.protocol.service import ShardService

_log = logging.getLogger("psstore.server")

LEADER = 0
"""Its number among the server's connections, and among the service's."""


class LeaderLink:
    """One per server. Without effect where it follows nobody."""

    def __init__(self, service: ShardService, poller: _core.Poller, now: Callable[[], float]) -> None:
        """`now`: the server's clock."""
        self.on_lost: Callable[[Exception | None], None] = lambda error: None
        """Called when the shard is out of reach, or can't be followed."""
        self._service = service
        self._poller = poller
        self._now = now

    def follow(
        self,
        sock: socket.socket,
        *,
        client: ClientIdentity,
        address: str,
        place: str = "",
        tls: _core.TlsSession | None = None,
    ) -> None:
        """Becomes a standby of the shard at the other end of a connected socket. `place`: where this one listens, if
        not where its shard does. `tls`: None: bytes go as they are."""
        protocol, hello = self._service.follow(LEADER, client=client, address=address, place=place, see=see)
        tune(sock)
        self._poller.add(LEADER, socket=sock.detach(), protocol=protocol, tls=tls)
        self._poller.send(LEADER, [hello])

    def heard(self, what: _core.Frame | Exception | None) -> None:
        """Something has come, or nothing will any more. What goes wrong is the end of following."""
        try:
            if not isinstance(what, _core.Frame):
                self.on_lost(what)
                return
            for output in self._service.frame(LEADER, what, self._now()):
                assert isinstance(output, Send), "a standby closes no connections"
                self._poller.send(LEADER, output.pieces)
        except Exception as error:
            self.on_lost(error)

    def cut(self, why: str) -> None:
        """Leaves the shard for that reason."""
        _log.warning("the connection to the shard is cut: %s", why)
        self.lose()

    def lose(self) -> None:
        """Leaves the shard, which says nothing, without a word."""
        self.end()
        self.on_lost(None)

    def end(self) -> None:
        """Leaves it, as this one leads from now on."""
        self._poller.drop(LEADER)

    def retire(self) -> bool:
        """Never leads. Whether the shard is told: then that one closes the connection."""
        word = self._service.leadership.retire()
        if word is not None:
            self._poller.send(LEADER, [word])
        return word is not None
