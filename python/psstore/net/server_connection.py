"""One accepted connection and its end, as its server sees it. Its bytes go past Python: the poller has the socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from psstore import _core
from psstore.errors import PsstoreError
from psstore.protocol.frames import Piece, failure_frame

if TYPE_CHECKING:
    from psstore.net.server import Server


class ServerConnection:
    """Tells `server` when nothing more will come from its peer, and then when the socket is closed."""

    def __init__(self, server: Server, *, number: int, address: str, protocol: _core.ServerProtocol) -> None:
        self.id = number
        self.address = address
        """The peer's, for logs."""
        self.closed = False
        """Nothing more is decoded or sent; what was sent may still be on its way."""
        self._server = server
        self._protocol = protocol
        self._linger: asyncio.TimerHandle | None = None

    def send(self, pieces: Sequence[Piece]) -> None:
        """One write of all pieces, at once; those that the socket has no room for stay referenced until they are out.
        Copies none that is large."""
        if not self.closed:
            self._server.poller.send(self.id, pieces)

    def refuse(self, error: PsstoreError) -> None:
        """Tells the peer why the connection ends, and ends it."""
        self.send([failure_frame(0, error)])
        self.close()

    def close(self) -> None:
        """Ends the connection once what was sent is out and the peer has closed it, too, or its time is over."""
        if not self.closed:
            self._server.poller.close(self.id)
            self._linger = self._server.loop.call_later(self._server.limits.linger_s, self.abort)
            self._end()

    def abort(self) -> None:
        """Cuts it off."""
        self._server.poller.drop(self.id)
        self.gone(None)

    def gone(self, cause: OSError | None) -> None:
        """The poller does not have it any more. `cause`: None if the peer, or we, wanted it so."""
        if not self.closed and cause is None and self._protocol.mid_frame:
            self._server.log(self, logging.DEBUG, "closed by the peer in the middle of a frame")
        if self._linger is not None:
            self._linger.cancel()
        self._end()
        self._server.lost(self, cause)

    def _end(self) -> None:
        if not self.closed:
            self.closed = True
            self._server.ended(self)
