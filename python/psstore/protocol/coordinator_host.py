"""What the coordinator in a shard's process is told, and where its answers go.

All that it is told its standbys are sent, too (coordinator_feed.py). It is told nothing where there is none, or where
this process is a standby: then it hears what the leading one was told.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from psstore import _core
from psstore.errors import BadArgument, PsstoreError, UnexpectedMessage
from psstore.protocol.connection import Connection
from psstore.protocol.coordinator import Coordinator
from psstore.protocol.coordinator_feed import CHANGES_NOTHING, Told, feed
from psstore.protocol.frames import Output, Send, failure
from psstore.protocol.leadership import Leadership
from psstore.protocol.replies import Reply
from psstore.protocol.standstill import Standstill
from psstore.wire import messages as m
from psstore.wire import records as r

CLOCK_GRAIN_S = 1e-6
"""What is added where a time goes from one clock to another, so that it is over there, too, when it is over here."""


class CoordinatorHost:
    """Where one shard's coordinator lives, if it has one. Single-threaded, as its service."""

    def __init__(
        self,
        coordinator: Coordinator | None,
        data: _core.DataService,
        *,
        shard: int,
        leadership: Leadership,
        standstill: Standstill,
    ) -> None:
        self.coordinator = coordinator
        self._data = data
        self._shard = shard
        self._leadership = leadership
        self._standstill = standstill
        self._owed: dict[tuple[int, int], int] = {}
        """(connection, request) of an unanswered control request -> op of its reply."""
        self._due: tuple[float | None] | None = None
        """When time alone brings something to the coordinator; None: it has to be asked anew. Data goes past it."""
        self._clock_ahead_s = 0.0
        """By how much the coordinator's clock is ahead of the driver's: it goes on where a leader on another machine
        has left it."""

    @property
    def num_owed(self) -> int:
        """Requests that wait for their answers."""
        return len(self._owed)

    # ---- what it is told ----

    def ask(self, connection: Connection, op: int, frame: _core.Frame, now: float) -> list[Output]:
        """A request for the coordinator. Raises PsstoreError."""
        due_before = self._due
        if self.coordinator is None:
            raise UnexpectedMessage(f"operation {op} is the coordinator's; ask shard 0, this is {self._shard}")
        if not connection.is_first:
            raise UnexpectedMessage(f"operation {op} is the coordinator's; ask it on the client's channel 0")
        asked = conn, request = connection.id, frame.request
        self._owed[asked] = op + 1
        outputs = self.tell(r.ClientAsked(conn, request, op, frame.body, connection.client, now))
        if asked not in self._owed:
            self._keep_due(due_before, now)
        return outputs

    def shard_said(self, fact: m.AppliedFact, now: float) -> list[Output]:
        """This process's own shard has applied a decision."""
        due_before = self._due
        outputs = self.tell(r.ShardSaid(fact, now))
        if not fact.missing:
            self._keep_due(due_before, now)
        return outputs

    def tell(self, told: Told) -> list[Output]:
        """Tells the coordinator, if it is here, and its standbys."""
        if self.coordinator is None or self._leadership.standby is not None:
            return []
        if self._clock_ahead_s or self._standstill.since is not None:
            told = replace(told, now=self._time(told.now))
        self._due = None
        if self._data.is_followed and not (isinstance(told, r.ClientAsked) and told.op in CHANGES_NOTHING):
            for body in r.bodies_of(told):
                self._data.record(body)
        return self._send_replies(feed(self.coordinator, told))

    def refused(self, conn: int, request: int) -> None:
        """A request was answered with an error."""
        self._owed.pop((conn, request), None)

    def closed(self, conn: int, now: float) -> None:
        """A connection is gone, and with it whoever waited there."""
        self._owed = {key: op for key, op in self._owed.items() if key[0] != conn}
        self.tell(r.ClientWent(conn, now))

    def _send_replies(self, replies: Sequence[Reply]) -> list[Output]:
        """Replies to connections that are gone are dropped: whoever comes back asks again."""
        outputs: list[Output] = []
        for reply in replies:
            op = self._owed.pop((reply.conn, reply.request), None)
            if op is None:
                continue
            if isinstance(reply.result, PsstoreError):
                outputs.append(failure(reply.conn, reply.request, reply.result))
                continue
            body = m.encode_body(reply.result) if reply.result is not None else b""
            if len(body) > _core.MAX_BODY_BYTES:
                outputs.append(failure(reply.conn, reply.request, _too_large(body)))
            else:
                outputs.append(Send(reply.conn, [_core.encode_frame(op, request=reply.request, body=body)]))
        return outputs

    # ---- its clock ----

    def lead(self, now: float, *, clock_ahead_s: float) -> None:
        """This process leads from now on, with its clock so much behind that of the one before."""
        self._clock_ahead_s = clock_ahead_s
        if self.coordinator is not None:
            self.coordinator.all_went(now + clock_ahead_s)

    def goes_on(self, now: float) -> None:
        """A standstill is over: nobody could be heard, and so nobody is late."""
        if self._standstill.since is not None:
            self._clock_ahead_s -= now - self._standstill.since

    def next_wake(self) -> float | None:
        """When time alone may next bring something; None: not before it is told something."""
        if self.coordinator is None or self._leadership.standby is not None or self._standstill.since is not None:
            return None
        if self._due is None:
            self._due = (self.coordinator.next_wake(),)
        wake = self._due[0]
        if wake is None or not self._clock_ahead_s:
            return wake
        return wake - self._clock_ahead_s + CLOCK_GRAIN_S

    def counters(self, now: float, *, client: str) -> dict[str, int | float | str]:
        """For STATS."""
        return {} if self.coordinator is None else self.coordinator.counters(self._time(now), client=client)

    def _time(self, now: float) -> float:
        """Its clock goes on where that of the process went which led before, and stands still with the shard."""
        since = self._standstill.since
        return (now if since is None else since) + self._clock_ahead_s

    def _keep_due(self, before: tuple[float | None] | None, now: float) -> None:
        """The coordinator was told what makes nobody wait: a request that was answered, a decision that a shard has
        applied. Who has just spoken is not lost within `silence_s`: what was due before is so still, at the latest."""
        wake = None if before is None else before[0]
        if wake is not None and self.coordinator is not None:
            is_soon = wake <= now + self._clock_ahead_s + self.coordinator.membership.liveness.silence_s
            self._due = before if is_soon else None


def _too_large(body: bytes) -> PsstoreError:
    return BadArgument(
        f"the reply is {len(body)} bytes, and one holds {_core.MAX_BODY_BYTES}; ask for fewer tensors at a time"
    )
