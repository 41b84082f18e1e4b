"""A shard's data operations: what is applied before what, and which pulls wait. Part of the shard's service.

Carried decisions are applied before the operation that carries them: a worker's push of a round can never
overtake the decision on its last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from psstore import _core
from psstore.errors import (
    NOT_APPLIED,
    BadSignature,
    DeadlineExceeded,
    NotAWorker,
    OutOfMemory,
    PsstoreError,
    StaleIncarnation,
)
from psstore.protocol.connection import Connection
from psstore.protocol.filling import Filling
from psstore.protocol.frames import Output, Piece, Send, failure
from psstore.protocol.rounds import Made
from psstore.protocol.sharing import MAX_LENT_BYTES, Lent, described
from psstore.protocol.signing import Signer
from psstore.types import ITEM_BYTES, Tensor
from psstore.wire import messages as m

OPS = _core.OPS
WRITES = frozenset((OPS["PUSH"], OPS["ASSIGN"], OPS["ADD"], OPS["INIT"], OPS["RESTORE"]))
"""Requests with a payload."""

READS = frozenset((OPS["PULL"], OPS["NORM"]))
"""Requests whose reply has one."""

NOT_YET = (_core.ERROR_CODES["NOT_INITIALISED"], NOT_APPLIED)
"""What a read may wait for, slice by slice."""


class Read(NamedTuple):
    """A PULL or NORM."""

    connection: Connection
    frame: _core.Frame
    carry: m.Carry
    until: float
    """It may wait so long for a decision, for what a decision lacks, or for a first value."""


class Slices:
    """Pushes, pulls and plain writes of one shard."""

    def __init__(
        self,
        *,
        index: int,
        shard: _core.Shard,
        signer: Signer,
        connections: Mapping[int, Connection],
        max_lent_bytes: int = MAX_LENT_BYTES,
    ) -> None:
        """`max_lent_bytes`: of values that one connection may read where they lie."""
        self.shard = shard
        self._index = index
        self._signer = signer
        self._connections = connections
        self._lent = Lent(max_lent_bytes)
        self._filling = Filling()
        self.desk = shard.make_desk()
        """Answers what needs no judgement of ours, before it would come here, and keeps the reads that wait. What a
        device answers is waited for."""
        if shard.device != "cpu":
            self.desk.close()
        self.largest_bytes = 1
        """Of a slice's value, so far."""
        self._patience_s = 0.0
        """For how long the last read may wait that told something: others do as it does."""
        self._scaled = 0
        """The last decision whose scale was told here: it is, with every read and push from then on."""
        self._lacks_scale = False
        """The last decision is to be scaled, and was not: whoever joins has to hear of it."""
        self._unaffordable: m.DecisionFact | None = None
        """The next decision, if there was no room for the rule state that it asks for. It is told only once."""

    # ---- facts that clients carry ----

    def define(self, facts: Sequence[m.Signed]) -> None:
        for signed in facts:
            fact = self._signer.open(signed)
            if isinstance(fact, Tensor):
                self._define(fact)
            elif isinstance(fact, m.DropFact):
                for tensor_id in fact.ids:
                    self.shard.drop(tensor_id)
                self.desk.touched_all()
            else:
                raise BadSignature("DEFINE carries a fact that is no definition")

    def _define(self, tensor: Tensor) -> None:
        mine = []
        for index, shard in enumerate(tensor.shards):
            if shard == self._index:
                begin, end = tensor.bounds(index)
                mine.append((tensor.key(index), end - begin))
        spec = tensor.spec
        largest_elems = max((num_elems for _, num_elems in mine), default=0)
        self.largest_bytes = max(self.largest_bytes, largest_elems * ITEM_BYTES[spec.dtype])
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
        connection.port.attach(fact.rank, fact.incarnation)
        connection.ticket = fact

    def applied(self) -> m.AppliedFact:
        """What the coordinator is to know of this shard."""
        applied = self.shard.version - 1 if self._lacks_scale else self.shard.version
        return m.AppliedFact(shard=self._index, decision=applied, missing=tuple(self.shard.missing()))

    def attest(self) -> m.Signed:
        """It, for a worker to carry."""
        return self._signer.sign(self.applied())

    def _check_life(self, ticket: m.TicketFact) -> None:
        newest = self.desk.newest_incarnation(ticket.rank)
        if ticket.incarnation < newest:
            raise StaleIncarnation(
                f"rank {ticket.rank} lives on as incarnation {newest}; this client is incarnation {ticket.incarnation}"
                " and was replaced",
                rank=ticket.rank,
            )

    def _learn(self, connection: Connection, carry: m.Carry) -> None:
        """Applies the carried decisions that are new here, then the scale that the last may need.

        Who is no worker has no say in the scale: nothing else vouches for it."""
        self.hear(carry.decisions)
        if carry.scale is not None and connection.ticket is not None:
            self._set_scale(carry.scale)

    def hear(self, decisions: Sequence[m.Signed]) -> None:
        """Applies those that are new here, in order."""
        for signed in decisions:
            fact = m.decode_fact(signed.blob)
            if isinstance(fact, m.DecisionFact) and fact.number <= self.shard.version:
                continue  # known: nothing to verify, nothing to do
            self._signer.check(signed)
            if not isinstance(fact, m.DecisionFact):
                raise BadSignature("a fact that is no decision was carried as one")
            self.take(fact)

    def take(self, decision: m.DecisionFact) -> None:
        """Applies the next one. Raises what the shard raises: OutOfMemory also to those who wait for it later."""
        try:
            self.shard.advance(_to_core(decision))
        except OutOfMemory:
            self._unaffordable = decision
            raise
        self._unaffordable, self._lacks_scale = None, decision.max_norm is not None
        self.desk.reached_version()

    def catch_up(self, made: Sequence[Made]) -> None:
        """Applies what this process has decided. Who was told of it is about to say so, all in the same words."""
        for decision in made:
            self.take(decision.fact)
        if not made:
            return  # a worker has said that no shard needs them any more, which was not so
        news = m.Carry(decisions=tuple([decision.signed for decision in made]))
        if made[-1].fact.early:
            self._note_known(news)  # as pushes say it
        self._note_known(replace(news, at_least=self.shard.version, wait_s=self._patience_s))

    def _note_heard(self, frame: _core.Frame, carry: m.Carry) -> None:
        """Whoever brings the same again, brings nothing: what was learned stays learned."""
        is_scaled = carry.scale is None or carry.scale.decision <= self._scaled
        if is_scaled and carry.at_least <= self.shard.version:
            self.desk.remember(frame.body, wait_s=carry.wait_s)

    def _note_known(self, carry: m.Carry) -> None:
        self.desk.remember(m.encode_body(carry), wait_s=carry.wait_s)

    def _set_scale(self, scale: m.Scale) -> None:
        if self._scaled < scale.decision == self.shard.version:
            self.shard.set_scale(scale.decision, scale.factor)
            self._scaled, self._lacks_scale = scale.decision, False
            self.desk.touched_all()

    # ---- writes ----

    def admit(self, connection: Connection, frame: _core.Frame) -> _core.Buffer | None:
        """The header of a write is here: carried decisions first, then room for the payload (None: discard it)."""
        if frame.op == OPS["PUSH"]:
            ticket = connection.ticket
            if ticket is None or (frame.rank, frame.incarnation) != (ticket.rank, ticket.incarnation):
                raise NotAWorker(f"PUSH as rank {frame.rank} needs ATTACH with its ticket on this connection first")
            self._check_life(ticket)
            carry = m.decode_body(m.Carry, frame.body)
            self._learn(connection, carry)
            self._note_heard(frame, carry)
        return self.shard.admit(frame)

    def write(self, connection: Connection, frame: _core.Frame) -> list[Output]:
        """The payload of an admitted write is in."""
        if frame.op == OPS["PUSH"]:
            table = self.shard.stage(frame)
        elif frame.op == OPS["INIT"]:
            table = self.shard.initialise(frame)
        elif frame.op == OPS["RESTORE"]:
            table = self.shard.restore(frame, connection.writer)
        else:
            table = self.shard.write(frame, connection.writer)
        self.desk.touched(frame)
        head = _core.encode_frame(frame.op + 1, request=frame.request, sequence=self.shard.version, table=table)
        return [Send(connection.id, [head])]

    # ---- reads ----

    def read(self, connection: Connection, frame: _core.Frame, now: float) -> list[Output]:
        """Answers a PULL or NORM at once if it can, else parks it until what it waits for is there."""
        carry = _carried(frame)
        self._learn(connection, carry)
        self._note_heard(frame, carry)
        self._patience_s = carry.wait_s
        return self._answer(Read(connection, frame, carry, now + carry.wait_s), now)

    def wake(self, now: float) -> list[Output]:
        """Answers the parked reads whose wait is over, by what happened or by time, and sends the replies whose bytes
        are there now. Call after every event."""
        outputs = self.filled()
        wake = self.desk.next_wake()
        if wake is None or wake > now:
            return outputs
        answered, left = self.desk.wake(now)
        outputs += [Send(conn, pieces) for conn, pieces in answered]
        for conn, frame, until in left:
            try:
                outputs += self._answer(Read(self._connections[conn], frame, _carried(frame), until), now)
            except PsstoreError as error:
                outputs.append(failure(conn, frame.request, error))
        return outputs

    def filled(self) -> list[Output]:
        """The replies whose bytes a device has written by now."""
        ready = self._filling.take_ready()
        if ready:
            self.shard.flush()  # whoever gets a lent value may count on it that its pushes' memory is free again
        return ready

    @property
    def is_filling(self) -> bool:
        return bool(self._filling)

    def forget(self, conn: int) -> None:
        """The connection is gone: nobody waits or reads there."""
        self.desk.forget(conn)
        self._lent.forget(conn)
        self._filling.forget(conn)

    def release(self, conn: int, request: int) -> None:
        """The answer to that request was read where its values lie."""
        self._lent.release(conn, request)

    def overdue(self, now: float) -> list[int]:
        """Connections that have had what they were lent for longer than they may."""
        return self._lent.overdue(now)

    def next_wake(self) -> float | None:
        """When `wake` may next do something: at once if a write whose payload is still on its way brought news,
        or if a device is filling in a reply."""
        return 0.0 if self._filling else self.desk.next_wake()

    def _answer(self, read: Read, now: float) -> list[Output]:
        """The reply, and others that are there by now; nothing if it has to wait, and still may: then it is parked."""
        return self._look_up(read, now, whole=False) + self.filled()

    def _look_up(self, read: Read, now: float, *, whole: bool) -> list[Output]:
        """The same; nothing if a device is to fill it in."""
        frame, carry, patient = read.frame, read.carry, read.until > now
        if self.shard.version < carry.at_least and self._unaffordable is not None:
            self.take(self._unaffordable)
        if self.shard.version < carry.at_least:
            if patient:
                self._park(read, version=carry.at_least)
                return []
            raise DeadlineExceeded(
                f"shard {self._index} is at version {self.shard.version}; version {carry.at_least} did not come within"
                f" {carry.wait_s:g} s",
                waited_s=carry.wait_s,
            )
        conn = read.connection.id
        share = frame.shared and bool(read.connection.arenas) and self._lent.has_room(conn)
        table, pieces, shared, ready = self._read(frame, share=share, whole=whole)
        missing = table.first_failure()
        if patient and missing is not None and missing[1] in NOT_YET:
            self._park(read, key=table.keys()[missing[0]])
            return []

        reply = partial(self._reply, read, table, pieces, shared=shared, version=self.shard.version, now=now)
        if ready is None or (shared and read.connection.is_own):
            return [reply()]

        def finish() -> list[Output]:
            if shared or whole or all(_core.say_changes(table, piece) for piece in pieces):
                return [reply()]
            return self._look_up(read, now, whole=True)

        self._filling.add(conn, frame.request, ready, finish)
        return []

    def _reply(
        self, read: Read, table: _core.SliceTable, pieces: Sequence[Piece], *, shared: bool, version: int, now: float
    ) -> Send:
        """`version`: of the shard, when it was read: `now`."""
        conn, frame = read.connection.id, read.frame
        head = _core.encode_frame(
            frame.op + 1,
            flags=_core.FLAG_SHARED if shared else 0,
            request=frame.request,
            sequence=version,
            table=table,
            payload_bytes=table.payload_bytes,
            payload_crc=_checksum(pieces) if read.connection.wants_checksum and not shared else None,
        )
        if shared:
            self._lent.lend(conn, frame.request, pieces, now)
            return Send(conn, [*self._news(read.connection), head])
        return Send(conn, [head, *pieces])

    def _news(self, connection: Connection) -> list[Piece]:
        """A device's blocks that a client has to know before it reads what lies there."""
        if connection.is_own:
            return []
        blocks = self.shard.shared_blocks(connection.blocks[-1].number if connection.blocks else 0)
        if not blocks:
            return []
        connection.blocks += blocks
        news = m.Shared(blocks=tuple(map(described, blocks)))
        return [_core.encode_frame(OPS["SHARED"], body=m.encode_body(news))]

    def _park(self, read: Read, *, version: int | None = None, key: int | None = None) -> None:
        connection = read.connection
        self.desk.park(
            connection.id,
            read.frame,
            wants_checksum=connection.wants_checksum,
            until=read.until,
            version=version,
            key=key,
        )

    def _read(
        self, frame: _core.Frame, *, share: bool, whole: bool
    ) -> tuple[_core.SliceTable, Sequence[Piece], bool, _core.Fence | None]:
        """(table, values, whether the table says where they lie, what to wait for before the values are sent)."""
        if frame.op == OPS["PULL"]:
            return self.shard.read(frame, share=share, whole=whole)
        table, sums, ready = self.shard.norms(frame)
        return table, sums, False, ready


def _carried(frame: _core.Frame) -> m.Carry:
    return m.decode_body(m.Carry, frame.body) if frame.body else m.Carry()


def _checksum(pieces: Sequence[Piece]) -> int:
    crc = 0
    for piece in pieces:
        crc = _core.crc32c(piece, crc)
    return crc


def _to_core(fact: m.DecisionFact) -> _core.Decision:
    members = fact.members
    return _core.Decision(  # by position: its keywords would take as long as all it does
        fact.number,
        fact.skip,
        fact.divisor,
        [(member.rank, member.incarnation, member.round, member.weight) for member in members],
        fact.hypers,
        {member.rank: member.present for member in members},
        fact.early,
        fact.max_norm is not None,
    )
