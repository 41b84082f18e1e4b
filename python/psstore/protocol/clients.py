"""Which clients are connected, and what each was answered of late. Part of the coordinator."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, cast

from psstore.wire.messages import Message

Answer = TypeVar("Answer", bound=Message | None)

MAX_ANSWERS = 64
"""Answers kept per client. Only what is still unanswered is ever asked again, and few of a client's requests
that change something are under way at once."""

MAX_AWAY = 4096
"""Clients remembered after they went, as many as a shard remembers for plain writes (table/write_window.h)."""

AWAY_S = 120.0
"""How long a client is remembered after it went: four times what it has by default to find its store again."""

KEPT_AWAY = 256
"""How many of the clients that went last are remembered for ever: a store that few clients come to forgets none."""


@dataclass(slots=True)
class Known:
    """What is remembered of one client."""

    connections: set[int] = field(default_factory=set)
    lost_at: float = 0.0
    """When the last connection was lost."""
    answers: dict[int, Message | None] = field(default_factory=dict)
    """Request number -> answer, in the order in which they were given."""


class Clients:
    """Tells of a client whether it is gone, and answers what it asks again as it was answered before."""

    def __init__(self) -> None:
        self._present: dict[str, Known] = {}
        self._away: OrderedDict[str, Known] = OrderedDict()
        """Clients without a connection, in the order in which they went."""
        self._client_of: dict[int, str] = {}

    @property
    def connections(self) -> list[int]:
        """Numbers of the open ones."""
        return list(self._client_of)

    def attached(self, conn: int, client: str) -> None:
        self._client_of[conn] = client
        if client not in self._present:
            self._present[client] = self._away.pop(client, Known())
        self._present[client].connections.add(conn)

    def detached(self, conn: int, now: float) -> None:
        client = self._client_of.pop(conn, None)
        if client is None:
            return
        known = self._present[client]
        known.connections.discard(conn)
        if known.connections:
            return
        known.lost_at = now
        self._away[client] = self._present.pop(client)
        while self._may_forget(now):
            self._away.popitem(last=False)

    def is_gone(self, client: str, *, now: float, patience_s: float) -> bool:
        """True if the client had no connection for more than `patience_s`, or never had one."""
        if client in self._present:
            return False
        return client not in self._away or now - self._away[client].lost_at > patience_s

    def once(self, client: str, request: int, answer: Callable[[], Answer]) -> Answer:
        """`answer()`, or what it returned when this client's request of that number came first.

        For requests that change something each time: a client that lost the answer asks again by the same number.
        """
        answers = self._present[client].answers
        if request not in answers:
            answers[request] = answer()
            if len(answers) > MAX_ANSWERS:
                del answers[next(iter(answers))]
        return cast(Answer, answers[request])

    def _may_forget(self, now: float) -> bool:
        """The one that went first."""
        if len(self._away) <= KEPT_AWAY:
            return False
        first = next(iter(self._away.values()))
        return len(self._away) > MAX_AWAY or now - first.lost_at > AWAY_S
