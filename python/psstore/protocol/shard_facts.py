"""What a shard is told by clients and has to verify: signed definitions, tickets and decisions.

Everything else about data is the compiled `DataService`'s (csrc/server/data_service.h). It hands out a request that
carries a new decision, and takes it back once the decision is applied here: a worker's push of a round can never
overtake the decision on its last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from psstore import _core
from psstore.errors import BadArgument, BadBody, BadSignature, OutOfMemory, StaleIncarnation, UnexpectedMessage
from psstore.protocol.connection import Connection
from psstore.protocol.decision_log import Made
from psstore.protocol.sharing import MAX_LEASED_BYTES, blocks_frame
from psstore.protocol.signing import Signer
from psstore.protocol.words import Words
from psstore.types import RowsSpec, Tensor, rule_number
from psstore.wire import messages as m
from psstore.wire import records as r
from psstore.wire.ranges import well_formed

TENSORS_IN_RECORD = 4096
"""Definitions in one frame to a standby: about a megabyte."""

SETTLE_BYTES = 1 << 20
"""How many bytes of parameters are brought up to date at a time: about a quarter of a millisecond, or half of one if
they are rows of a table."""

SETTLE_SLOTS = 64
"""How many slots at most are brought up to date at a time, if they are small. With 4 slots of 4 KiB, three quarters of
the time were Python's."""

SETTLE_SLOTS_ON_DEVICE = 4096
"""How many slots are brought up to date at a time on a device, which is only told what to do, all of it in one launch:
about half a millisecond of this process."""


class ShardFacts:
    """The facts that one shard has verified and follows."""

    def __init__(
        self, *, index: int, shard: _core.Shard, signer: Signer, max_leased_bytes: int = MAX_LEASED_BYTES
    ) -> None:
        """`max_leased_bytes`: how much of its values one connection may read where they lie, at a time."""
        self.shard = shard
        self._index = index
        self._signer = signer
        self.data = shard.make_data_service(max_leased_bytes=max_leased_bytes, describe_blocks=blocks_frame)
        self.tensors: dict[int, Tensor] = {}
        """What has been defined here, by id."""
        self.words = Words()
        self._decided: dict[int, bytes] = {}
        """By number, as they are signed: the last decision that was applied here, and the next if it could not be."""

    def settle_some(self) -> bool:
        """Brings some slots up to date with the last decision. True: nothing is left to do."""
        if self.shard.device == "cpu":
            return self.shard.settle(SETTLE_SLOTS, SETTLE_BYTES)
        return self.shard.settle(SETTLE_SLOTS_ON_DEVICE)

    def define(self, facts: Sequence[m.Signed]) -> None:
        done = 0
        try:
            for signed in facts:
                self._define(self._signer.open(signed))
                done += 1
        finally:
            if done:
                self._record(r.TensorsDefined(tuple(facts[:done])))

    def _define(self, fact: m.Fact) -> None:
        if isinstance(fact, Tensor):
            self.define_tensor(fact)
        elif isinstance(fact, m.DropFact):
            for tensor_id in fact.ids:
                self.tensors.pop(tensor_id, None)
                self.shard.drop(tensor_id)
            self.data.schema_changed()
        else:
            raise BadSignature("DEFINE carries a fact that is no definition")

    def define_tensor(self, tensor: Tensor) -> None:
        """Makes the slots that the shard is to have of it, if it has not: each client says what tensors there are."""
        if self.tensors.get(tensor.id) == tensor:
            return
        mine = []
        for index, shard in enumerate(tensor.shards):
            if shard == self._index:
                begin, end = tensor.bounds(index)
                mine.append((tensor.key(index), end - begin))
        spec = tensor.spec
        if spec.rows is not None:
            mine = [(key, 0) for key, _ in mine]
        self.shard.define(
            tensor.id,
            dtype=_core.DTYPES[spec.dtype],
            rule=rule_number(spec.rule),
            group=spec.group,
            zeros=spec.zeros,
            slices=mine,
            rows=None if spec.rows is None else _rows_to_core(spec.rows),
            reduction=(_core.REDUCTIONS[spec.reduction], spec.trim),
            compensation=spec.compensation,
        )
        self.tensors[tensor.id] = tensor

    def attach(self, connection: Connection, ticket: m.Signed) -> None:
        """Lets the connection push as the worker that its ticket names."""
        fact = self._signer.open(ticket)
        if not isinstance(fact, m.TicketFact) or fact.client != connection.client:
            raise BadSignature("ATTACH carries a fact that is no ticket of this client")
        newest = self.data.newest_incarnation(fact.rank)
        if fact.incarnation < newest:
            raise StaleIncarnation(
                f"rank {fact.rank} lives on as incarnation {newest}; this client is incarnation {fact.incarnation}"
                " and was replaced",
                rank=fact.rank,
            )
        connection.protocol.attach(fact.rank, fact.incarnation)
        connection.ticket = fact
        self._record(r.LifeAttached(fact.rank, fact.incarnation))

    def may_follow(self, connection: Connection, follow: m.Follow) -> m.FollowFact:
        """Who is a standby of this shard, as a process of the store says. Raises BadSignature, BadArgument."""
        fact = self._signer.open(follow.fact)
        if not isinstance(fact, m.FollowFact) or fact.client != connection.client:
            raise BadSignature("FOLLOW carries a fact that does not say so of this client")
        if fact.shard != self._index:
            raise BadArgument(f"a standby of shard {fact.shard} asks shard {self._index}; it has another address")
        return fact

    def applied(self) -> m.AppliedFact:
        """What the coordinator is to know of this shard: its last decision, and which contributions it lacked."""
        return m.AppliedFact(shard=self._index, decision=self.data.applied, missing=tuple(self.shard.missing()))

    def attest(self) -> m.Signed:
        """`applied`, signed, for a worker to carry to the coordinator."""
        return self._signer.sign(self.applied())

    def measure(self, connection: Connection, asked: m.Attest) -> m.Signed:
        """What the connection's worker has pushed in that round, which can't be changed here from then on, signed.
        Raises UnexpectedMessage before ATTACH, BadArgument if not all was pushed that is asked for."""
        ticket = connection.ticket
        if ticket is None:
            raise UnexpectedMessage("ATTEST of a round before ATTACH: whose contribution is it?")
        if not well_formed(asked.present):
            raise BadArgument("attest.present must be ascending, disjoint ranges (first, last) that don't touch")
        origin = (ticket.rank, ticket.incarnation, asked.round)
        self.shard.seal(*origin)
        self._record(r.PushesSealed(*origin))
        squares = self.shard.staged_squares(*origin, tensors=asked.present)
        if squares is None:
            raise BadArgument(
                f"rank {ticket.rank} ends round {asked.round} with tensors of which shard {self._index} has no gradient"
                " from it: name only what was acknowledged"
            )
        return self._signer.sign(
            m.MeasuredFact(
                shard=self._index,
                rank=ticket.rank,
                incarnation=ticket.incarnation,
                round=asked.round,
                present=asked.present,
                squares=squares,
            )
        )

    def hear(self, carry: m.Carry) -> None:
        """Applies the carried decisions that are new here, in order. Raises BadSignature, BadBody if they end before
        the one that the body announces, and what `take` raises."""
        for signed in carry.decisions:
            fact = m.decode_fact(signed.blob)
            if isinstance(fact, m.DecisionFact) and fact.number <= self.shard.version:
                continue  # known: nothing to verify, nothing to do
            self._signer.check(signed)
            if not isinstance(fact, m.DecisionFact):
                raise BadSignature("a fact that is no decision was carried as one")
            self.take(fact, signed.blob)
        if self.shard.version < carry.newest:
            raise BadBody(f"body of Carry: newest is {carry.newest}, and its decisions end at {self.shard.version}")

    def may_save(self, save: m.Save) -> m.SaveFact:
        """What the coordinator has told the shard to write, which is at that decision then. Raises BadSignature."""
        fact = self._signer.open(save.fact)
        if not isinstance(fact, m.SaveFact):
            raise BadSignature("SAVE carries a fact that does not say what to write")
        self.hear(m.Carry(decisions=save.decisions, newest=fact.version))
        return fact

    def has_saved(self, attempt: str, record: bytes) -> m.Signed:
        """The shard's word for it, for whoever carries it to the coordinator."""
        return self._signer.sign(m.SavedFact(shard=self._index, attempt=attempt, record=record))

    def take(self, fact: m.DecisionFact, blob: bytes) -> None:
        """Applies the next decision; `blob`: as it is signed. Raises what the shard raises: OutOfMemory also to those
        who wait for it later."""
        decision, record = _to_core(fact), r.DecisionTaken(blob)
        applied = self.shard.version
        self._decided = {number: one for number, one in self._decided.items() if number == applied}
        self._decided[fact.number] = blob
        try:
            self.shard.advance(decision)
        except OutOfMemory:
            self.data.could_not_apply(decision, r.encode_record(record))
            raise
        self._record(record)
        self.data.advanced(fact.max_norm is not None)

    def give_word(self, client: str, *, leads: bool) -> bool:
        """What this shard says of another one's standby, now or ever before. Raises Overloaded."""
        if self.words.give(client, leads=leads):
            self._record(r.WordGiven(client, leads))
        return self.words.of[client]

    def as_it_is(self, *, epoch: int, coordinator: bytes) -> Iterator[r.AnyRecord]:
        """What a new standby is sent first; its slots come after that."""
        shard, history = self.shard, msgspec.msgpack.encode(self.shard.history())
        last = self._decided.get(shard.version, b"")
        yield r.FillBegins(shard.version, epoch, last, history, coordinator, self.words.of)
        for writer, forgotten, runs in shard.refusals():
            yield r.WritesRefused(writer, forgotten, tuple(runs))
        for rank, incarnation in self.data.newest_incarnations.items():
            yield r.LifeAttached(rank, incarnation)
        tensors = list(self.tensors.values())
        for first in range(0, len(tensors), TENSORS_IN_RECORD):
            yield r.TensorsThere(tuple(tensors[first : first + TENSORS_IN_RECORD]))

    def resume(self, history: Sequence[object], last: bytes) -> None:
        """Goes on from what another process of this shard knew, beside its tensors and slots."""
        fact = m.decode_fact(last) if last else None
        decision = fact if isinstance(fact, m.DecisionFact) else None
        self._decided = {decision.number: last} if decision is not None else {}
        self.shard.resume(history, _to_core(decision) if decision is not None else None)

    def _record(self, record: r.AnyRecord) -> None:
        if self.data.is_followed:
            for body in r.bodies_of(record):
                self.data.record(body)

    def catch_up(self, made: Sequence[Made]) -> None:
        """Applies what the coordinator of this process has decided."""
        for decision in made:
            self.take(decision.fact, decision.signed.blob)


def _rows_to_core(rows: RowsSpec) -> tuple[int, int, float, float, int, tuple[int, int, int, int, int, float]]:
    admit = "after" if rows.admit_after > 1 else "probability" if rows.admit_probability < 1 else "always"
    bounds = (
        rows.partition_rows,
        _core.EVICTIONS.get(rows.evict, 0),
        rows.ttl,
        _core.ADMISSIONS[admit],
        rows.admit_after,
        rows.admit_probability,
    )
    return rows.dim, _core.FIRST_VALUES[rows.init], rows.a, rows.b, rows.seed, bounds


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
        fact.average,
        fact.loss_scales,
    )
