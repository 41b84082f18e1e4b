"""What a shard and the clients of its machine share: answers that say where values lie instead of bringing them.

The memory itself is csrc/shm/; how its files get from one process to the other is psstore.net's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from psstore import _core
from psstore.protocol.connection import Connection
from psstore.protocol.frames import Piece
from psstore.wire.messages import Shared

MAX_LENT = 1024
"""Answers of one connection that it may have before it says that it has read them; later ones go over the stream.
As many as reads may be parked: what they refer to can't be freed, and is replaced out of place."""

Borrow = Callable[[Shared], _core.ClientMemory | None]
"""A client's way to the files that a shard offers. None: they are out of reach, which is no error."""


class Lender(Protocol):
    """A shard's way to hand its files to clients."""

    def offer(self, connection: Connection) -> Shared:
        """Whoever comes with the ticket gets the files, and the connection its push arena."""

    def withdraw(self, connection: Connection) -> None:
        """The connection is gone, and what it was offered is not to be had any more."""


class Lent:
    """The answers that clients are still reading: their values stay what they are meanwhile."""

    def __init__(self) -> None:
        self._pieces: dict[int, dict[int, Sequence[Piece]]] = {}
        """Connection -> request -> what its answer refers to."""

    def has_room(self, conn: int) -> bool:
        return len(self._pieces.get(conn, ())) < MAX_LENT

    def lend(self, conn: int, request: int, pieces: Sequence[Piece]) -> None:
        self._pieces.setdefault(conn, {})[request] = pieces

    def release(self, conn: int, request: int) -> None:
        self._pieces.get(conn, {}).pop(request, None)

    def forget(self, conn: int) -> None:
        """The connection is gone, and with it who was reading."""
        self._pieces.pop(conn, None)
