"""Which connections a shard has, and which of them have to go: those that say nothing, and those of whom there are too
many."""

from __future__ import annotations

import itertools
import math

from psstore.errors import HandshakeTimeout
from psstore.protocol.connection import HANDSHAKE_S, STRANGER_S, VISITOR_S, WORKERS_SHARE, Connection
from psstore.protocol.frames import Output, ended_by
from psstore.protocol.states import ConnectionState
from psstore.wire.messages import Hello


class Connections:
    """The connections of one shard."""

    def __init__(self, max_connections: int | None) -> None:
        """`max_connections`: that the driver takes; None: any number."""
        self.of: dict[int, Connection] = {}
        """By number."""
        self.max_visitors = math.inf if max_connections is None else max_connections - max_connections // WORKERS_SHARE
        self._strangers: dict[int, Connection] = {}
        """Connections that have not proved themselves, oldest first. Every turn looks at their times, and there may be
        thousands of other connections."""
        self._silent: dict[int, Connection] = {}
        """Visitors that had asked nothing when they were looked at last, oldest first."""

    def opened(self, connection: Connection) -> None:
        """A stranger comes."""
        self.of[connection.id] = self._strangers[connection.id] = connection

    def proved(self, connection: Connection) -> None:
        """The connection is no stranger's any more."""
        self._strangers.pop(connection.id, None)

    def takes_visitor(self, connection: Connection) -> bool:
        """Whether there is room for the connection, which is a visitor's."""
        self._silent[connection.id] = connection
        return sum(one.is_visitor for one in self.of.values()) <= self.max_visitors

    def closed(self, conn: int) -> Connection | None:
        """Forgets a connection, which has ended. None: it was forgotten before."""
        connection = self.of.pop(conn, None)
        if connection is not None:
            connection.end()
        self._strangers.pop(conn, None)
        self._silent.pop(conn, None)
        return connection

    def dispensable(self, now: float) -> int | None:
        """The connection that makes room where there is none for another: the oldest stranger, or else the oldest
        visitor that has not asked anything; None: all are in use, or have only just come."""
        for connection in itertools.islice(self._strangers.values(), 1):
            if now - connection.opened_at >= STRANGER_S:
                return connection.id
        for connection in list(self._silent.values()):
            if not connection.protocol.has_asked:
                return connection.id if now - connection.opened_at >= VISITOR_S else None
            del self._silent[connection.id]
        return None

    def overdue(self, now: float) -> list[Output]:
        """Ends the connections of strangers whose handshake takes too long."""
        outputs: list[Output] = []
        for connection in self._strangers.values():
            if now - connection.opened_at >= HANDSHAKE_S:
                outputs += ended_by(connection.id, HandshakeTimeout(f"no handshake within {HANDSHAKE_S:g} s"))
        return outputs

    def next_wake(self) -> float | None:
        """When another stranger may be `overdue`."""
        oldest = next(iter(self._strangers.values()), None)
        return None if oldest is None else oldest.opened_at + HANDSHAKE_S

    def siblings(self, connection: Connection, hello: Hello) -> tuple[list[int], list[int]]:
        """Open connections of the same client in the same role on the same channel, accepted before and after this one.

        Only the newest may speak: all that was unanswered is sent again on it, and what an older one still brings
        would come out of order, and take answers to where nobody listens.
        """
        others = [
            other.id
            for other in self.of.values()
            if other is not connection and other.state is ConnectionState.OPEN and other.is_of(hello)
        ]
        return [conn for conn in others if conn < connection.id], [conn for conn in others if conn > connection.id]
