"""Who has asked for another number of shards, and hears what becomes of it.

The store's supervisor does it. When it is done the store's processes are others, and whoever asked connects to those;
when it has come to nothing, it is told why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from psstore import _core
from psstore.errors import BadArgument, Overloaded
from psstore.protocol.connection import Connection
from psstore.protocol.frames import Output, failure
from psstore.text import counted
from psstore.wire import messages as m


class _Asked(NamedTuple):
    client: str
    conn: int
    request: int


class ReshardRequest:
    """The one that a store is at work on, if any. Single-threaded, as its service."""

    def __init__(self) -> None:
        self.on_asked: Callable[[int], None] = _refuse
        """Called with the number of shards that the store is to go on with. Raises BadArgument."""
        self._asked: _Asked | None = None
        """None once it has come to nothing. It outlives its connection: the store may be on its way all the same."""

    def ask(self, connection: Connection, frame: _core.Frame) -> None:
        """A client asks. It may ask again, over another connection. Raises BadArgument, Overloaded."""
        asked, client = self._asked, connection.client
        if asked is None:
            self.on_asked(m.decode_body(m.Reshard, frame.body).shards)
        elif asked.client != client:
            raise Overloaded("somebody else has asked for another number of shards already; ask again in a while")
        self._asked = _Asked(client, connection.id, frame.request)

    def came_to_nothing(self, why: str) -> list[Output]:
        """The store goes on with the shards that it has."""
        asked, self._asked = self._asked, None
        return [] if asked is None else [failure(asked.conn, asked.request, BadArgument(why))]


def _refuse(shards: int) -> None:
    raise BadArgument(
        f"this store can't go on with {counted(shards, 'shard')} while it runs: they live inside a program, or on hosts"
        " of their own. End it and start it with so many and --restore auto: a checkpoint fits any number"
    )
