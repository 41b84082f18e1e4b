"""What a client does, as sequences of requests over its sessions: join, create, push, commit, pull.

Coroutines without asyncio: all they await are the driver's futures, so that the same code runs over
sockets and in the simulator. A request is under way as soon as it is made; awaiting only collects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from psstore import _core
from psstore.errors import BadArgument, BadBody, NotAWorker, PsstoreError, UnknownTensor, from_code
from psstore.protocol.facts import Facts
from psstore.protocol.session import Answer, Future, Identity, Session
from psstore.types import Tensor, TensorSpec
from psstore.wire import messages as m
from psstore.wire.ranges import to_ranges

T = TypeVar("T")

GRACE_S = 5.0
"""A client waits so much longer than it told the store to wait: the store's error says more."""


class Driver(Protocol):
    """What the client needs from the world."""

    def now(self) -> float: ...
    def future(self) -> Future: ...
    def flush(self, session: Session) -> None:
        """The session may have output."""


class Transfer(NamedTuple):
    """Slices of one frame to or from one shard, with the memory that they come from or go to."""

    shard: int
    table: _core.SliceTable
    memory: _core.Segments | None


class Client:
    """One client of one store. Not thread-safe."""

    def __init__(
        self, *, driver: Driver, identity: Identity, facts: Facts, sessions: Sequence[Session], timeout_s: float
    ) -> None:
        self.identity = identity
        self.sessions = sessions
        self.timeout_s = timeout_s
        """How long a request may take, when the caller names no time."""
        self.num_workers = 0
        self.round = 0
        """The round that pushes belong to; 0 before joining."""
        self.decision = 0
        """The decision that closed this worker's last round."""
        self.staleness = 0
        """Rounds that this worker was ahead of the slowest when its last commit was answered."""
        self._driver = driver
        self._facts = facts
        self._names: dict[int, str] = {}
        self._barriers: dict[str, int] = {}

    @property
    def joined(self) -> bool:
        return self.identity.ticket is not None

    @property
    def version(self) -> int:
        """Number of the last decision that this client knows, or that every shard has told it of."""
        return max(self._facts.last, self._facts.floor)

    # ---- membership ----

    async def join(self, *, rank: int | None, num_workers: int | None) -> None:
        """Becomes a worker and attaches to every shard. Raises RankTaken, TooManyWorkers, BadArgument."""
        joined = await self._control("JOIN", m.Join(rank=rank, num_workers=num_workers), m.Joined)
        self.identity.rank, self.identity.incarnation = joined.rank, joined.incarnation
        self.identity.ticket = joined.ticket
        self.round, self.decision = joined.round, joined.decision
        self._facts.learn(joined.decision, joined.decisions)
        attach = m.Attach(ticket=joined.ticket)
        await collect([self._request(session, "ATTACH", body=attach) for session in self.sessions])

    async def leave(self) -> None:
        """This worker is done: the others no longer wait for it. A client that never joined does nothing."""
        if self.joined:
            await self._request(self.sessions[0], "LEAVE")
            self.identity.ticket = None

    async def barrier(self, name: str, *, wait_s: float) -> None:
        """Returns when every expected worker has called it with this name. Raises WorkerLost, DeadlineExceeded."""
        self._need_worker("barrier")
        _check_wait(wait_s)
        count = self._barriers[name] = self._barriers.get(name, 0) + 1
        body = m.Barrier(name=name, count=count, wait_s=wait_s)
        await self._request(self.sessions[0], "BARRIER", body=body, timeout_s=wait_s + GRACE_S)

    # ---- tensors ----

    async def create(
        self, specs: Sequence[TensorSpec], *, exist: m.Exist, offer: bool
    ) -> tuple[list[Tensor], list[int]]:
        """Creates or matches tensors, known to every shard on return. Also: ids whose value is ours to send."""
        created = await self._control("CREATE", m.Create(specs=tuple(specs), exist=exist, offer=offer), m.Created)
        await self._define((*created.dropped, *created.tensors))
        return self._learn(created.tensors), list(created.initialise)

    async def ready(self, ids: Sequence[int]) -> None:
        """The first values of these tensors are in place."""
        await self._request(self.sessions[0], "READY", body=m.Ready(ids=tuple(ids)))

    async def describe(self, names: Sequence[str] | None) -> list[Tensor]:
        """These tensors, or all; known to every shard on return. Raises UnknownTensor naming the first missing."""
        asked = m.Describe(names=None if names is None else tuple(names))
        described = await self._control("DESCRIBE", asked, m.Described)
        missing = set(names or ()) - set(described.names)
        if missing:
            name = next(name for name in names or () if name in missing)
            raise UnknownTensor(f"no tensor is named {name!r}; store.keys() lists those there are", name=name)
        await self._define(described.tensors)
        return self._learn(described.tensors)

    async def keys(self) -> list[str]:
        """Names of all tensors."""
        return list((await self._control("DESCRIBE", m.Describe(names_only=True), m.Described)).names)

    async def drop(self, names: Sequence[str]) -> None:
        """Forgets tensors, on every shard. Raises UnknownTensor and drops none."""
        dropped = await self._control("DROP", m.Drop(names=tuple(names)), m.Dropped)
        await self._define(dropped.facts)

    async def stats(self) -> list[dict[str, int | float | str]]:
        """Counters of each shard."""
        replies = await collect([self._request(session, "STATS") for session in self.sessions])
        return [reply.counters for reply in replies]

    # ---- data ----

    async def write(self, op: str, transfers: Iterable[Transfer]) -> None:
        """ASSIGN, ADD or INIT. Returns when all is applied. Raises the first failure."""
        await self._send(op, transfers, body=None)

    async def push(self, transfers: Iterable[Transfer]) -> None:
        """Stages contributions for the current round. Returns when every one is acknowledged."""
        self._need_worker("push")
        await self._send("PUSH", transfers, body=m.Carry())

    async def commit(
        self,
        *,
        present: Iterable[int],
        hypers: Mapping[int, Mapping[str, float]],
        weight: float = 1.0,
        loss_scale: float = 1.0,
        non_finite: bool = False,
        average: bool = True,
        early: bool = False,
        max_norm: float | None = None,
        wait_s: float,
    ) -> m.Committed:
        """Ends the round, once every push is acknowledged; returns when it is decided and staleness allows.

        `present`: ids of the tensors that were pushed in this round.
        Raises WorkerLost or DeadlineExceeded; the commit stands then, and may be waited for again.
        """
        self._need_worker("commit")
        _check_wait(wait_s)
        body = m.Commit(
            round=self.round,
            hypers={group: dict(hyper) for group, hyper in hypers.items()},
            weight=weight,
            loss_scale=loss_scale,
            non_finite=non_finite,
            present=to_ranges(present),
            average=average,
            early=early,
            max_norm=max_norm,
            since=self._facts.last,
            floor=self._facts.floor,
            wait_s=wait_s,
        )
        committed = await self._control("COMMIT", body, m.Committed, timeout_s=wait_s + GRACE_S)
        self._facts.learn(committed.last, committed.decisions)
        self.decision = committed.decision
        self.staleness = max(0, committed.next_round - 1 - committed.slowest)
        self.round = committed.next_round
        return committed

    async def pull(self, transfers: Iterable[Transfer], *, at_least: int | None = None, wait_s: float) -> list[Answer]:
        """Reads slices into their memory, each shard at `at_least` or later (default: this worker's last round).

        Carries the decisions to every shard, also to those from which nothing is read. Answers are in the order
        of the transfers; NOT_MODIFIED is no failure.
        """
        _check_wait(wait_s)
        carry = m.Carry(at_least=self.decision if at_least is None else at_least, wait_s=wait_s)
        transfers = list(transfers)
        asked = {transfer.shard for transfer in transfers}
        behind = [s for s in self.sessions if s.shard not in asked and s.version < self._facts.last]
        told = [self._request(s, "PULL", body=m.Carry(), timeout_s=wait_s + GRACE_S) for s in behind]
        futures = [
            self._request(
                self.sessions[transfer.shard],
                "PULL",
                table=transfer.table,
                body=carry,
                destination=transfer.memory,
                timeout_s=wait_s + GRACE_S,
            )
            for transfer in transfers
        ]
        answers = (await collect([*told, *futures]))[len(told) :]
        self._check(answers)
        return answers

    # ---- how ----

    async def _send(self, op: str, transfers: Iterable[Transfer], *, body: m.Message | None) -> None:
        futures = [
            self._request(
                self.sessions[transfer.shard],
                op,
                table=transfer.table,
                body=body,
                payload=transfer.memory,
                round=self.round if op == "PUSH" else 0,
            )
            for transfer in transfers
        ]
        self._check(await collect(futures))

    async def _define(self, facts: Sequence[m.Signed]) -> None:
        if facts:
            body = m.Define(facts=tuple(facts))
            await collect([self._request(session, "DEFINE", body=body) for session in self.sessions])

    async def _control(self, op: str, body: m.Message, kind: type[T], *, timeout_s: float | None = None) -> T:
        reply = await self._request(self.sessions[0], op, body=body, timeout_s=timeout_s)
        if not isinstance(reply, kind):
            raise BadBody(f"the coordinator answered {op} with {type(reply).__name__}")
        return reply

    def _request(self, session: Session, op: str, *, timeout_s: float | None = None, **parts: Any) -> Future:
        future = self._driver.future()
        chosen = self.timeout_s if timeout_s is None else timeout_s
        session.request(op, future, now=self._driver.now(), timeout_s=chosen, **parts)
        self._driver.flush(session)
        return future

    def _learn(self, signed: Sequence[m.Signed]) -> list[Tensor]:
        """What the coordinator sent us is believed: the connection is authenticated, the MAC is for shards."""
        tensors = []
        for fact in map(m.decode_fact, (one.blob for one in signed)):
            if not isinstance(fact, Tensor):
                raise BadBody("the coordinator sent a fact that is no tensor where tensors belong")
            self._names[fact.id] = fact.spec.name
            tensors.append(fact)
        return tensors

    def _check(self, answers: Sequence[Answer]) -> None:
        """Raises the first slice's failure, naming its tensor."""
        for answer in answers:
            failure = answer.table.first_failure()
            if failure is not None:
                position, status = failure
                key = answer.table.keys()[position]
                name = self._names.get(key >> _core.SLICE_INDEX_BITS, f"of key {key}")
                meaning = _MEANINGS.get(status, "the shard refused it")
                raise from_code(status, f"tensor {name!r}: {meaning}", name=name)

    def _need_worker(self, what: str) -> None:
        if not self.joined:
            raise NotAWorker(f"{what} needs a worker: connect with role='worker' (the default), and before leave()")


def _check_wait(wait_s: float) -> None:
    if not 0.0 <= wait_s <= m.MAX_WAIT_S:
        raise BadArgument(f"wait_s is {wait_s}; it must be from 0 to {m.MAX_WAIT_S:g} seconds")


async def collect(futures: Sequence[Future]) -> list[Any]:
    """All results, in order. If some fail, waits for the rest, then raises the first failure."""
    results = []
    first: PsstoreError | None = None
    for future in futures:
        try:
            results.append(await future)
        except PsstoreError as error:
            first = first or error
    if first is not None:
        raise first
    return results


_MEANINGS = {
    _core.ERROR_CODES["UNKNOWN_KEY"]: "the shard does not know it; it was dropped or overwritten, describe it again",
    _core.ERROR_CODES["DTYPE_MISMATCH"]: "the values sent have a dtype that it does not take",
    _core.ERROR_CODES["SIZE_MISMATCH"]: "the bytes sent do not match its shape",
    _core.ERROR_CODES["RULE_MISMATCH"]: "its update rule does not take this operation"
    " (push and commit are for training rules, assign and add for tensors of those rules)",
    _core.ERROR_CODES["STALE_INCARNATION"]: "a newer life of this worker has joined; this one was replaced",
    _core.ERROR_CODES["NON_FINITE"]: "the values contain NaN or infinity, which this store refuses",
    _core.ERROR_CODES["NOT_INITIALISED"]: "it has no value yet: the client that created it did not send one in time",
}
"""What a slice's status means to a caller."""
