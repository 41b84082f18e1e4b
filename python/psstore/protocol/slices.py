"""A shard's data operations: what is applied before what, and which pulls wait. Part of the shard's service.

Carried decisions are applied before the operation that carries them: a worker's push of a round can never
overtake the decision on its last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from psstore import _core
from psstore.errors import BadSignature, DeadlineExceeded, NotAWorker, Overloaded, PsstoreError, StaleIncarnation
from psstore.protocol.connection import Connection
from psstore.protocol.frames import Output, Piece, Send, failure
from psstore.protocol.signing import Signer
from psstore.types import Tensor
from psstore.wire import messages as m

OPS = _core.OPS
WRITES = frozenset((OPS["PUSH"], OPS["ASSIGN"], OPS["ADD"], OPS["INIT"]))
"""Requests with a payload."""

MAX_PARKED = 1024
"""Pulls of one connection that may wait at a time, since each holds its table and its body. In frames of 4 MiB
they ask for 4 GiB."""

NOT_INITIALISED = _core.ERROR_CODES["NOT_INITIALISED"]


@dataclass(frozen=True)
class Parked:
    """A PULL that waits for a decision or for a first value."""

    connection: Connection
    frame: _core.Frame
    carry: m.Carry
    since: float

    @property
    def until(self) -> float:
        return self.since + self.carry.wait_s


class Slices:
    """Pushes, pulls and plain writes of one shard."""

    def __init__(self, *, index: int, shard: _core.Shard, signer: Signer) -> None:
        self.shard = shard
        self._index = index
        self._signer = signer
        self._parked: list[Parked] = []
        self._incarnations: dict[int, int] = {}
        """Rank -> newest life that attached here."""
        self._news = False
        """Something changed that a parked pull may wait for."""

    # ---- facts that clients carry ----

    def define(self, facts: Sequence[m.Signed]) -> None:
        for signed in facts:
            fact = self._signer.open(signed)
            if isinstance(fact, Tensor):
                self._define(fact)
            elif isinstance(fact, m.DropFact):
                for tensor_id in fact.ids:
                    self.shard.drop(tensor_id)
                self._news = True
            else:
                raise BadSignature("DEFINE carries a fact that is no definition")

    def _define(self, tensor: Tensor) -> None:
        mine = []
        for index, shard in enumerate(tensor.shards):
            if shard == self._index:
                begin, end = tensor.bounds(index)
                mine.append((tensor.key(index), end - begin))
        spec = tensor.spec
        self.shard.define(
            tensor.id,
            dtype=_core.DTYPES[spec.dtype],
            rule=_core.RULES[spec.rule],
            group=spec.group,
            zeros=spec.zeros,
            slices=mine,
        )

    def attach(self, connection: Connection, ticket: m.Signed) -> None:
        """Lets the connection push as the worker that its ticket names."""
        fact = self._signer.open(ticket)
        if not isinstance(fact, m.TicketFact) or fact.client != connection.client:
            raise BadSignature("ATTACH carries a fact that is no ticket of this client")
        self._check_life(fact)
        self._incarnations[fact.rank] = fact.incarnation
        connection.ticket = fact

    def _check_life(self, ticket: m.TicketFact) -> None:
        newest = self._incarnations.get(ticket.rank, 0)
        if ticket.incarnation < newest:
            raise StaleIncarnation(
                f"rank {ticket.rank} lives on as incarnation {newest}; this client is incarnation {ticket.incarnation}"
                " and was replaced",
                rank=ticket.rank,
            )

    def _advance(self, decisions: Sequence[m.Signed]) -> None:
        """Applies the carried decisions that are new here, in order."""
        for signed in decisions:
            fact = m.decode_fact(signed.blob)
            if isinstance(fact, m.DecisionFact) and fact.number <= self.shard.version:
                continue  # known: nothing to verify, nothing to do
            fact = self._signer.open(signed)
            if not isinstance(fact, m.DecisionFact):
                raise BadSignature("a fact that is no decision was carried as one")
            self.shard.advance(_to_core(fact))
            self._news = True

    # ---- writes ----

    def admit(self, connection: Connection, frame: _core.Frame) -> _core.Buffer | None:
        """The header of a write is here: carried decisions first, then room for the payload (None: discard it)."""
        if frame.op == OPS["PUSH"]:
            ticket = connection.ticket
            if ticket is None or (frame.rank, frame.incarnation) != (ticket.rank, ticket.incarnation):
                raise NotAWorker(f"PUSH as rank {frame.rank} needs ATTACH with its ticket on this connection first")
            self._check_life(ticket)
            self._advance(m.decode_body(m.Carry, frame.body).decisions)
        return self.shard.admit(frame)

    def write(self, connection: Connection, frame: _core.Frame) -> list[Output]:
        """The payload of an admitted write is in."""
        if frame.op == OPS["PUSH"]:
            table = self.shard.stage(frame)
        else:
            initial = frame.op == OPS["INIT"]
            table = self.shard.initialise(frame) if initial else self.shard.write(frame, connection.client)
            self._news = True
        head = _core.encode_frame(frame.op + 1, request=frame.request, sequence=self.shard.version, table=table)
        return [Send(connection.id, [head])]

    # ---- reads ----

    def pull(self, connection: Connection, frame: _core.Frame, now: float) -> list[Output]:
        """Reads at once if it can, else parks the pull until what it waits for is there."""
        carry = m.decode_body(m.Carry, frame.body) if frame.body else m.Carry()
        self._advance(carry.decisions)
        parked = Parked(connection, frame, carry, now)
        answer = self._read(parked, patient=carry.wait_s > 0)
        if answer is not None:
            return [answer]
        if sum(other.connection is connection for other in self._parked) >= MAX_PARKED:
            raise Overloaded(f"{MAX_PARKED} pulls of this connection wait already; await some before asking for more")
        self._parked.append(parked)
        return []

    def wake(self, now: float) -> list[Output]:
        """Answers the parked pulls whose wait is over, by news or by time. Call after every event."""
        if not self._parked or not (self._news or any(parked.until <= now for parked in self._parked)):
            self._news = False
            return []
        self._news = False
        outputs: list[Output] = []
        still = []
        for parked in self._parked:
            try:
                answer = self._read(parked, patient=parked.until > now)
            except PsstoreError as error:
                answer = failure(parked.connection.id, parked.frame.request, error)
            if answer is None:
                still.append(parked)
            else:
                outputs.append(answer)
        self._parked = still
        return outputs

    def forget(self, conn: int) -> None:
        """The connection is gone: nobody waits there."""
        self._parked = [parked for parked in self._parked if parked.connection.id != conn]

    def next_wake(self) -> float | None:
        """When `wake` may next do something: at once if a write whose payload is still on its way brought news."""
        if self._news and self._parked:
            return 0.0
        return min((parked.until for parked in self._parked), default=None)

    def _read(self, parked: Parked, *, patient: bool) -> Send | None:
        """The reply; None if it has to wait and `patient` says that it may."""
        frame, carry = parked.frame, parked.carry
        if self.shard.version < carry.at_least:
            if patient:
                return None
            raise DeadlineExceeded(
                f"shard {self._index} is at version {self.shard.version}; version {carry.at_least} did not come within"
                f" {carry.wait_s:g} s",
                waited_s=carry.wait_s,
            )
        table, pieces = self.shard.read(frame)
        failure = table.first_failure()
        if patient and failure is not None and failure[1] == NOT_INITIALISED:
            return None
        head = _core.encode_frame(
            OPS["PULLED"],
            request=frame.request,
            sequence=self.shard.version,
            table=table,
            payload_bytes=table.payload_bytes,
            payload_crc=_checksum(pieces) if parked.connection.wants_checksum else None,
        )
        return Send(parked.connection.id, [head, *pieces])


def _checksum(pieces: Sequence[Piece]) -> int:
    crc = 0
    for piece in pieces:
        crc = _core.crc32c(piece, crc)
    return crc


def _to_core(fact: m.DecisionFact) -> _core.Decision:
    return _core.Decision(
        fact.number,
        skip=fact.skip,
        divisor=fact.divisor,
        members=[(member.rank, member.incarnation, member.round, member.weight) for member in fact.members],
        hypers=fact.hypers,
        present={member.rank: member.present for member in fact.members},
    )
