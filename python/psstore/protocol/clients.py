"""Which clients are connected, and what each was answered of late. Part of the coordinator."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, cast

from msgspec import Struct

from psstore.errors import Overloaded
from psstore.wire.messages import Message, encode_body

Answer = TypeVar("Answer", bound=Message | None)

MAX_ANSWERS = 64
"""Answers kept per client. Only what is still unanswered is ever asked again, and few of a client's requests
that change something are under way at once."""

MAX_ANSWER_BYTES = 32 << 20
"""Bytes of all answers that are kept, as they are sent: two of the largest, which take about twice that in memory. One
that many clients got counts once."""

MAX_AWAY = 4096
"""Clients remembered after they went, as many as a shard remembers for plain writes (table/write_window.h)."""

AWAY_S = 120.0
"""How long a client is remembered after it went: four times what it has by default to find its store again."""

KEPT_AWAY = 256
"""How many of the clients that went last are remembered for ever: a store that few clients come to forgets none."""


class KeptAnswer(Struct):
    """An answer that was given."""

    answer: Message | None
    num_bytes: int
    num_requests: int = 0
    """To how many it was, of those that are remembered."""


@dataclass(slots=True)
class Known:
    """What is remembered of one client."""

    connections: set[int] = field(default_factory=set)
    lost_at: float = 0.0
    """When the last connection was lost."""
    requests: deque[int] = field(default_factory=deque)
    """Numbers of those whose answers are kept, in the order in which these were given."""
    forgotten: int = 0
    """The largest number of one whose answer was kept once."""


class Clients:
    """Tells of a client whether it is gone, and answers what it asks again as it was answered before."""

    def __init__(self) -> None:
        self._present: dict[str, Known] = {}
        self._away: OrderedDict[str, Known] = OrderedDict()
        """Clients without a connection, in the order in which they went."""
        self._client_of: dict[int, str] = {}
        self._answers: OrderedDict[tuple[str, int], KeptAnswer] = OrderedDict()
        """By client and request, in the order in which they were given."""
        self._last = KeptAnswer(None, 0)
        """The last of them."""
        self._num_bytes = 0
        """What all of them take together."""

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
            gone, known = self._away.popitem(last=False)
            while known.requests:
                self._forget(gone, known)

    def is_gone(self, client: str, *, now: float, patience_s: float) -> bool:
        """True if the client had no connection for more than `patience_s`, or never had one."""
        if client in self._present:
            return False
        return client not in self._away or now - self._away[client].lost_at > patience_s

    def once(self, client: str, request: int, answer: Callable[[], Answer]) -> Answer:
        """`answer()`, or what it returned when this client's request of that number came first.

        For requests that change something each time: a client that lost the answer asks again by the same number. Each
        of its requests has a larger number than those before. Raises Overloaded if the answer is not kept any more.
        """
        known = self._present[client]
        if (client, request) not in self._answers:
            if request <= known.forgotten:
                raise Overloaded(
                    f"request {request} came before, or others after it, and what it was answered is not kept any"
                    " longer: look what is there, and ask anew for what is not"
                )
            self._keep(client, known, request, answer())
        return cast(Answer, self._answers[client, request].answer)

    def _keep(self, client: str, known: Known, request: int, answer: Message | None) -> None:
        if self._last.answer is not answer:
            self._last = KeptAnswer(answer, 0 if answer is None else len(encode_body(answer)))
        if not self._last.num_requests:
            self._num_bytes += self._last.num_bytes
        self._last.num_requests += 1
        self._answers[client, request] = self._last
        known.requests.append(request)
        if len(known.requests) > MAX_ANSWERS:
            self._forget(client, known)
        while self._num_bytes > MAX_ANSWER_BYTES and len(self._answers) > 1:
            oldest, _ = next(iter(self._answers))
            self._forget(oldest, self._present.get(oldest) or self._away[oldest])

    def _forget(self, client: str, known: Known) -> None:
        """That client's oldest answer."""
        request = known.requests.popleft()
        known.forgotten = max(known.forgotten, request)
        kept = self._answers.pop((client, request))
        kept.num_requests -= 1
        if not kept.num_requests:
            self._num_bytes -= kept.num_bytes

    def _may_forget(self, now: float) -> bool:
        """The one that went first."""
        if len(self._away) <= KEPT_AWAY:
            return False
        first = next(iter(self._away.values()))
        return len(self._away) > MAX_AWAY or now - first.lost_at > AWAY_S
