"""What a client does, as sequences of requests over its sessions: join, create, push, commit, pull.

Coroutines without asyncio: all they await are the driver's futures, so that the same code runs over
sockets and in the simulator. A request is under way as soon as it is made; awaiting only collects.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence, Set
from typing import Any, NamedTuple, Protocol, TypeVar

from msgspec.structs import replace

from psstore import _core
from psstore.errors import (
    BadArgument,
    BadBody,
    DeadlineExceeded,
    NotAWorker,
    NotInitialised,
    OutOfMemory,
    PsstoreError,
    TornRound,
    UnknownTensor,
    UsageError,
    VersionGone,
)
from psstore.partition.router import Router
from psstore.protocol.decision_cache import DecisionCache
from psstore.protocol.handshake import ClientIdentity
from psstore.protocol.requests import IGNORED, Answer, Destination, Future
from psstore.protocol.session import Session
from psstore.protocol.sharing import Lease, Placed
from psstore.protocol.statuses import check
from psstore.types import Tensor, TensorSpec
from psstore.wire import messages as m
from psstore.wire.ranges import Ranges, to_ranges

T = TypeVar("T")

MAX_DROPPED_NAMES = 1024
"""Tensors whose names are remembered after they were dropped: for errors of whoever had not heard of it."""

MANY_DECISIONS = 256
"""A worker that is told so many as it joins has the shards attest with its first commit, unasked: a store whose workers
do as they are asked keeps half of that (rounds.py), and those before it may have left instead."""

LOOK_S = 0.02
"""How often whoever leads the writing of a checkpoint asks whether it is written."""

CHECKPOINT_ATTEMPTS = 3
"""How often one is begun: what shards hold goes where one of them is led by its standby from then on."""

JOIN_WAIT_S = 300.0
"""How long a worker waits for its first round, where others come and go: a few long steps."""

GRACE_S = 5.0
"""A client waits so much longer than it told the store to wait: the store's error says more."""


class Driver(Protocol):
    """What the client needs from the world."""

    def now(self) -> float: ...
    def future(self) -> Future: ...
    def flush(self, session: Session) -> None:
        """The session may have output."""

    def await_answer(self, session: Session) -> None:
        """The session has a request, and its caller waits for nothing else: the answer may be there on return."""


class Transfer(NamedTuple):
    """Slices of one frame to or from one shard, with the memory that they come from or go to."""

    way: int
    """The session that it goes over."""
    table: _core.SliceTable
    memory: Destination | Placed | None
    """To send from: `Segments` or what is `Placed`."""
    ids: bytes | None = None
    """Ids of the rows that are read: u64 each, in the order of the table."""


class Hold(NamedTuple):
    """A decision that every shard keeps for a reader."""

    reader: int
    """The number by which the shards know it."""
    version: int


class Client:
    """One client of one store. Not thread-safe."""

    def __init__(
        self,
        *,
        driver: Driver,
        identity: ClientIdentity,
        decisions: DecisionCache,
        sessions: Sequence[Session],
        timeout_s: float,
    ) -> None:
        """`sessions`: with each shard, then as many again for every further channel."""
        self.identity = identity
        self.sessions = sessions
        num_shards = sum(session.channel == 0 for session in sessions)
        self.shards = sessions[:num_shards]
        """The session with each shard for all that is no data: the one on channel 0."""
        self.ways = Router(num_shards, num_channels=1 + max((session.channel for session in sessions), default=0))
        self.timeout_s = timeout_s
        """How long a request may take, when the caller names no time."""
        self.num_workers = 0
        self.round = 0
        """The round that pushes belong to; 0 before joining."""
        self.decision = 0
        """The decision that closed this worker's last round."""
        self.staleness = 0
        """Rounds that this worker was ahead of the slowest when its last commit was answered."""
        self.member_log: list[m.Members] = []
        """Where workers come and go: each change of who takes part."""
        self.members: tuple[int, ...] = ()
        """Who takes part in the open round, there."""
        self._unfinished = False
        """The current round was committed early: its pushes go on until `finish`."""
        self.hand_in_wanted = False
        """A checkpoint is being written of the decision that this worker has come to."""
        self.stopped = False
        """No further commit of this worker will count."""
        self._is_measured = False
        """The store wants to know what shards have measured of contributions."""
        self._measured: tuple[m.Attest, tuple[m.Signed, ...]] | None = None
        """What was asked of this worker's last contribution, and what every shard has measured of it: once it counts
        it is there no longer."""
        self._asked_to_attest = False
        """The coordinator wants to know what the shards have applied."""
        self._unanswered = False
        """A commit was sent, and what became of it is not known here."""
        self.is_sealed = False
        """That stands, and was not early: nothing more can be pushed for the round."""
        self._begins_early = False
        """That is under way, and is early."""
        self.waits_since: float | None = None
        """When it began to wait for other workers; None: it does not."""
        self.on_wait: Callable[[], None] | None = None
        """Told before each such wait."""
        self._torn: TornRound | None = None
        """Why some slices will never be read again."""
        self._driver = driver
        self._decisions = decisions
        self._names: dict[int, str] = {}
        """Names of tensors by id, for messages."""
        self._dropped: deque[int] = deque()
        """Ids of tensors that were dropped, the latest at the end: an error about one shall say its name."""
        self._num_barriers = 0
        self._num_holds = 0

    @property
    def joined(self) -> bool:
        return self.identity.ticket is not None

    @property
    def version(self) -> int:
        """Number of the last decision that this client knows, or that every shard has told it of."""
        heard = [
            max(one.version for one in self.sessions[shard :: len(self.shards)]) for shard in range(len(self.shards))
        ]
        return max(self._decisions.last, min(heard))

    @property
    def is_promised(self) -> bool:
        """Whether the round is, or is being, committed early, and goes on until `finish`."""
        return self._unfinished or self._begins_early

    @property
    def is_current(self) -> bool:
        """Whether a read shows every decision that anybody was told of, with nobody asked before: there is no decision
        without this worker's commit, or no shard but the coordinator's own."""
        if len(self.shards) == 1:
            return True
        welcome = self.sessions[0].welcome
        needs_us = welcome is not None and welcome.quorum == welcome.num_workers
        return self.joined and needs_us and not self._unanswered

    @property
    def unscaled(self) -> m.DecisionFact | None:
        """The last decision, if it clips and its scale is not known here: somebody has to ask for the `norm` and
        `set_scale`, and every worker of the round does, whatever became of the others. Also true of a decision that
        was made before this client joined. None for a reader, whom no shard would believe."""
        return self._decisions.unscaled if self.identity.incarnation else None

    # ---- membership ----

    async def join(
        self, *, rank: int | None, num_workers: int | None, wait_s: float = JOIN_WAIT_S, goes_on: bool = False
    ) -> None:
        """Becomes a worker and attaches to every shard. `wait_s`: how long for the end of the open round, where workers
        come and go. `goes_on`: in the place of a life that failed. Raises RankTaken, TooManyWorkers, BadArgument,
        DeadlineExceeded."""
        _check_wait(wait_s)
        body = m.Join(rank=rank, num_workers=num_workers, wait_s=wait_s, goes_on=goes_on)
        joined = await self._joined(body)
        welcome = self.sessions[0].welcome
        self._is_measured = welcome is not None and welcome.refuse_norm is not None
        self.identity.rank, self.identity.incarnation = joined.rank, joined.incarnation
        self.identity.ticket = joined.ticket
        self.round, self.decision, self._unfinished, self._measured = joined.round, joined.decision, False, None
        self.stopped = joined.stop
        self._asked_to_attest = len(joined.decisions) >= MANY_DECISIONS
        self._decisions.learn(joined.decision, joined.decisions)
        for session in self.sessions:
            session.identified()
        attach = m.Attach(ticket=joined.ticket)
        await collect([self._request(session, "ATTACH", body=attach) for session in self.sessions])

    async def _joined(self, body: m.Join) -> m.Joined:
        """The answer, once all is known of who came and went."""
        while True:
            asking = replace(body, members=len(self.member_log))
            asked = self._request(self.sessions[0], "JOIN", body=asking, timeout_s=body.wait_s + GRACE_S)
            joined = _expect(m.Joined, await asked)
            self._learn_members(joined.members)
            if not joined.more:
                return joined

    def _learn_members(self, news: Sequence[m.Members]) -> None:
        if news:
            self.member_log += news
            self.members = m.members_after(self.members, news)
            self.num_workers = len(self.members)

    async def leave(self) -> None:
        """This worker is done: the others no longer wait for it. A client that never joined does nothing."""
        if self.joined:
            await self._request(self.sessions[0], "LEAVE")
            self.identity.ticket = None
            for session in self.sessions:
                session.identified()

    async def barrier(self, name: str, *, wait_s: float, once: bool = False) -> None:
        """Returns when every expected worker has called it with this name. `once`: a replacement doesn't wait where
        others are past it. Raises WorkerLost, DeadlineExceeded, BadArgument."""
        self.need_worker("barrier")
        _check_wait(wait_s)
        if len(name) > m.MAX_BARRIER_CHARS:
            raise BadArgument(f"barrier: the name has {len(name)} characters, expected {m.MAX_BARRIER_CHARS} at most")
        self._num_barriers += 1  # of all names: larger with each call of any
        body = m.Barrier(name=name, count=self._num_barriers, wait_s=wait_s, once=once)
        await self._coordinate("BARRIER", body, wait_s=wait_s)

    # ---- tensors ----

    async def create(
        self, specs: Sequence[TensorSpec], *, exist: m.Exist, offer: bool
    ) -> tuple[list[Tensor], list[int]]:
        """Creates or matches tensors, known to every shard on return. Also: ids whose value is ours to send. Raises
        OutOfMemory if a shard has no room for its part, BadArgument if it can have no such tensor; then none of them
        was created."""
        created = await self._control("CREATE", m.Create(specs=tuple(specs), exist=exist, offer=offer), m.Created)
        try:
            await self._define((*created.dropped, *created.tensors))
        except (OutOfMemory, BadArgument):
            if created.made:  # none, rather than the part of them that some shards have
                await self.drop(created.made)
            raise
        self._forget(created.dropped)
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
        self._forget(dropped.facts)

    async def share(self, session: Session, *, push_bytes: int) -> m.Shared:
        """Where to get at the device that the session's shard offers to share."""
        reply = await self._request(session, "SHARE", body=m.Share(push_bytes=push_bytes))
        return _expect(m.Shared, reply)

    def lender(self, lease: Lease) -> Session:
        """Over which the values were lent: who shares memory with a shard has one connection to it."""
        return self.shards[lease.shard]

    def end_leases(self, leases: Sequence[Lease]) -> bool:
        """`Session.end_lease` for each, and tells the shards. False: one was over already."""
        ended = [self.lender(lease).end_lease(lease) for lease in leases]
        if ended:
            self._flush()
        return all(ended)

    async def stats(self) -> list[dict[str, int | float | str]]:
        """Counters of each shard."""
        replies = await collect([self._request(session, "STATS") for session in self.shards])
        return [reply.counters for reply in replies]

    async def waited_for(self) -> str:
        """Which workers others wait for at this moment, described; '': nobody waits."""
        reply = await self._request(self.sessions[0], "STATS")
        return str(reply.counters.get("waited_for", ""))

    # ---- data ----

    async def write(self, op: str, transfers: Iterable[Transfer], *, trained: bool = False) -> None:
        """ASSIGN, ADD, RESTORE or INIT; `trained`: of what decisions change, too. Returns when all is applied. Raises
        the first failure."""
        if trained:
            await self._bring_up_to_date()
        await self._send(op, transfers, body=None)

    async def _bring_up_to_date(self) -> None:
        """Every shard has applied what anybody was told of when this returns: else a step of before would be taken of
        what is written now."""
        if not self.is_current:
            await self._learn_decisions()
        await self.answers(self._tell(self._behind()))

    async def push(self, transfers: Iterable[Transfer]) -> None:
        """Stages contributions for the current round. Returns when every one is acknowledged.

        Raises BadArgument while the last round is `unscaled`: shards still need what was pushed for it; and while it
        `is_sealed`."""
        self.check_push()
        await self._send("PUSH", transfers, body=m.Carry())

    def check_push(self) -> None:
        """What `push` raises before anything is sent."""
        self.need_worker("push")
        self._need_scale("push")
        self.need_open("push")

    def need_open(self, what: str) -> None:
        """Raises BadArgument if the round `is_sealed`."""
        if self.is_sealed:
            raise BadArgument(
                f"{what}: round {self.round} was committed, and what became of it is not known here: commit again,"
                " which waits for that; what is pushed then is of the next round"
            )

    async def commit(
        self,
        *,
        present: Iterable[int],
        hypers: dict[int, dict[str, float]],
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
        `early`: they may be pushed later; the round goes on until `finish`.
        `max_norm`: the decision is then `unscaled`, and no slice takes its step before that is settled.
        Raises WorkerLost or DeadlineExceeded; the commit stands then, and may be waited for again. Raises BadArgument
        if the last round is unfinished or unscaled, TornRound if there can't be another one.
        """
        self.need_worker("commit")
        self._need_scale("commit")
        if self._unfinished:
            raise BadArgument(f"commit: round {self.round} was committed early; push what it promised, then finish()")
        _check_wait(wait_s)
        if self._decisions.scale is not None:
            await self._tell_scale()
        self._forget_applied()
        applied = await self._attest() if self._asked_to_attest else ()
        ranges = to_ranges(present)
        measured = await self._measure(ranges) if self._is_measured and ranges and not (early or non_finite) else ()
        self._unanswered, self.is_sealed, self._begins_early = True, not early, early
        body = m.Commit(
            round=self.round,
            hypers=hypers,
            weight=weight,
            loss_scale=loss_scale,
            non_finite=non_finite,
            present=ranges,
            average=average,
            early=early,
            max_norm=max_norm,
            since=self._decisions.last,
            applied=applied,
            measured=measured,
            members=len(self.member_log),
            wait_s=wait_s,
        )
        try:
            committed = _expect(m.Committed, await self._coordinate("COMMIT", body, wait_s=wait_s))
        except UsageError:
            self.is_sealed = False  # nothing was committed
            raise
        finally:
            self._begins_early = False
        self._decisions.learn(committed.last, committed.decisions)
        self._learn_members(committed.members)
        self._unanswered = self.is_sealed = False
        self._asked_to_attest = committed.attest
        self.decision = committed.decision
        self.staleness = max(0, committed.next_round - 1 - committed.slowest)
        self.hand_in_wanted, self.stopped = committed.hand_in, committed.stop
        self._unfinished = early and not committed.late
        if not self._unfinished:
            self.round = committed.next_round
        return committed

    async def finish(self, *, wait_s: float) -> None:
        """Ends an early committed round, once every push is acknowledged; returns when all members have.

        Raises DeadlineExceeded: it may be called again. Raises TornRound if a member is gone that had not finished:
        reads under way fail with it, too, for what they wait for will not come."""
        self.need_worker("finish")
        if not self._unfinished:
            raise BadArgument(f"finish: round {self.round} was not committed early")
        _check_wait(wait_s)
        body = m.Finish(round=self.round, wait_s=wait_s)
        finished = _expect(m.Finished, await self._coordinate("FINISH", body, wait_s=wait_s))
        self.round, self._unfinished = finished.next_round, False

    async def hand_in(self, state: bytes) -> None:
        """What this rank's next life is to have again, as of the decision that it has come to."""
        self.need_worker("hand_in")
        self.hand_in_wanted = False
        version, size = self.version, m.HANDED_PIECE_BYTES
        for offset in range(0, max(1, len(state)), size):
            end = offset + size
            body = m.HandIn(version=version, state=state[offset:end], offset=offset, more=end < len(state))
            await self._request(self.shards[0], "HAND_IN", body=body)

    async def handed_in(self) -> tuple[int, bytes] | None:
        """What was handed in for this rank last, behind its version; None: nothing."""
        self.need_worker("handed_in")
        found = bytearray()
        while True:
            back = await self._control("HAND_BACK", m.HandBack(offset=len(found)), m.HandedBack)
            if back.state is None:
                return None
            found += back.state
            if not back.more:
                return back.version, bytes(found)

    async def stop(self, version: int | None, *, finish: bool = False, everyone: bool = False) -> None:
        """This worker's commits count up to that decision only, or `everyone`'s. None: nobody's count from now on, or
        `finish` from the next decision on."""
        self.need_worker("stop")
        body = m.Stop(version=version, finish=finish, everyone=everyone)
        self.stopped = (await self._control("STOP", body, m.Stopped)).stop

    def set_scale(self, scale: m.Scale) -> None:
        """What the gradients of the last decision are multiplied by: carried to the shards from now on."""
        self._decisions.set_scale(scale)

    async def norm(self, transfers: Iterable[Transfer], *, wait_s: float) -> list[Answer]:
        """Reads a float64 per slice into the transfers' memory: the sum of squares of the gradient that the last
        decision reduced. NOT_MODIFIED, without a value: no member has a gradient there."""
        return await self._read("NORM", transfers, at_least=self._decisions.last, wait_s=wait_s)

    async def pull(
        self, transfers: Iterable[Transfer], *, at_least: int | None = None, trained: bool = True, wait_s: float
    ) -> list[Answer]:
        """Reads slices into their memory, each shard at `at_least` or later (default: this worker's last round), and
        at every decision that anybody was told of before.

        Carries the decisions to every shard, also to those from which nothing is read. `trained`: False if no decision
        changes what is read; then nobody is asked for the last one. Answers are in the order of the transfers;
        NOT_MODIFIED and NO_STATE are no failures.
        """
        if trained and not self.is_current:
            at_least = max(at_least or 0, await self._learn_decisions())
        return await self._read("PULL", transfers, at_least=at_least, wait_s=wait_s)

    async def pull_rows(
        self, transfers: Iterable[Transfer], *, wait_s: float, hold: Hold | None = None
    ) -> list[Answer]:
        """`pull` of rows of tables, which are trained, or `pull_held`. The `version` of an entry of the transfers'
        tables says how many of the `ids` are its."""
        at_least = None if hold is None else hold.version
        if hold is None and not self.is_current:
            at_least = await self._learn_decisions()
        return await self._read("PULL_ROWS", transfers, at_least=at_least, wait_s=wait_s, hold=hold)

    async def list_rows(self, hold: Hold, transfers: Iterable[Transfer], *, wait_s: float) -> list[Answer]:
        """Reads which rows partitions of tables have as of the decision that is held: of each from the number on that
        its entry's `version` says, as much as fits a frame; of part 0 the ids, of part 1 the records. An answer's
        `version` says how many there are. Raises VersionGone, DeadlineExceeded."""
        return await self._read("LIST_ROWS", transfers, at_least=hold.version, wait_s=wait_s, hold=hold)

    async def hold(self, *, state: bool, wait_s: float) -> Hold:
        """Has every shard keep the values, and rule state if `state`, of one decision, which everything that anybody
        was told of is in: nobody's training waits for it. Each shard is asked for its version and keeps what comes
        after it; the latest of them is what all shards have, and settle on."""
        _check_wait(wait_s)
        reader, versions = await self._hold_on(state=state)
        hold = Hold(reader, max(versions))
        try:
            await self._learn_up_to(hold.version)
            await self._settle(hold, wait_s=wait_s)
        except BaseException:
            self.free(reader)
            raise
        return hold

    async def checkpoint(
        self,
        url: str | None,
        *,
        gather_s: float,
        pause: Callable[[float], Awaitable[object]],
        now: Callable[[], float],
        wait_s: float,
        whole: bool = False,
    ) -> int:
        """Leads the writing of a checkpoint to `url`, or where the store writes its own, and returns its version: the
        last decision when every shard kept what comes after, or the next one if workers hand in, which they may take
        `gather_s` to do. Shards write beside training. `pause` waits for so many seconds by the clock `now`. `whole`:
        not without what workers hand in.

        Raises StorageError, VersionGone, BadArgument, DeadlineExceeded."""
        _check_wait(wait_s)
        again = _until(
            now() + wait_s, now, pause, f"no checkpoint was written within {wait_s:g} s; is its storage slow?"
        )
        for _ in range(CHECKPOINT_ATTEMPTS - 1):
            try:
                return await self._write_checkpoint(url, gather_s, whole, again)
            except VersionGone:
                await again()
        return await self._write_checkpoint(url, gather_s, whole, again)

    async def _write_checkpoint(
        self, url: str | None, gather_s: float, whole: bool, again: Callable[[], Awaitable[None]]
    ) -> int:
        saved: tuple[m.Signed | None, ...] = (None,)
        while None in saved:
            while not (await self._control("BEGIN", m.Begin(url=url), m.Begun)).ready:
                await again()
            reader, _ = await self._hold_on(state=True)
            try:
                begin = m.Begin(url=url, reader=reader, gather_s=gather_s, whole=whole)
                while (begun := await self._control("BEGIN", begin, m.Begun)).gathering:
                    await self._keep_holding(reader, begun.version)
                    await again()
                if begun.save is None or begun.version is None:
                    continue  # somebody else was first
                body, hold = m.Save(fact=begun.save, decisions=begun.decisions), Hold(reader, begun.version)
                while None in saved:
                    replies = await collect([self._request(session, "SAVE", body=body) for session in self.shards])
                    saved = tuple(_expect(m.Saved, reply).saved for reply in replies)
                    if None in saved:
                        await again()
                        await self._settle(hold, wait_s=self.timeout_s)  # it stays for those who are heard of
            finally:
                self.free(reader)
                if None in saved:
                    self._let_go_of_checkpoint(reader)
        keep = m.Keep(saved=tuple(one for one in saved if one is not None))
        while not (await self._control("KEEP", keep, m.Kept)).done:
            await again()
        assert begun.version is not None, "it is written"
        return begun.version

    async def checkpoint_at_standstill(
        self,
        url: str | None,
        *,
        gather_s: float,
        pause: Callable[[float], Awaitable[object]],
        now: Callable[[], float],
        wait_s: float,
    ) -> int:
        """As `checkpoint`, but nothing happens in the store any more, as its supervisor has allowed it: whatever
        anybody was told is in it."""
        _check_wait(wait_s)
        until = now() + wait_s
        again = _until(until, now, pause, f"the store did not come to stand still within {wait_s:g} s")
        while not (await self._control("BEGIN", m.Begin(url=url), m.Begun)).ready:  # before anybody has to wait
            await again()
        await self._freeze(self.shards[0], gather_s, again)
        await self._learn_decisions()
        for session in self.shards[1:]:
            await collect(self._tell([session]))
            await self._freeze(session, 0.0, again)
        return await self.checkpoint(url, gather_s=0.0, pause=pause, now=now, wait_s=until - now())

    async def _freeze(self, session: Session, gather_s: float, again: Callable[[], Awaitable[None]]) -> None:
        body = m.Freeze(gather_s=gather_s)
        while not _expect(m.Frozen, await self._request(session, "FREEZE", body=body)).done:
            await again()

    async def reach(self, version: int, *, wait_s: float) -> None:
        """Returns when that decision was made. Raises DeadlineExceeded."""
        _check_wait(wait_s)
        carry = m.Carry(at_least=version, wait_s=wait_s)
        await self._request(self.shards[0], "PULL", body=carry, timeout_s=wait_s + GRACE_S)

    def free(self, reader: int) -> None:
        """The shards need not keep anything for it any longer. Nobody waits for their answers."""
        for session in self.shards:
            if session.failure is None:
                session.request("FREE", IGNORED, now=self._driver.now(), timeout_s=self.timeout_s, sequence=reader)
                self._driver.flush(session)

    def _let_go_of_checkpoint(self, reader: int) -> None:
        """Makes room for the next one, which comes of itself, but later. Nobody waits for the answer."""
        session = self.sessions[0]
        if session.failure is None:
            body = m.Begin(reader=reader, give_up=True)
            session.request("BEGIN", IGNORED, now=self._driver.now(), timeout_s=self.timeout_s, body=body)
            self._driver.flush(session)

    async def pull_held(self, hold: Hold, transfers: Iterable[Transfer], *, wait_s: float) -> list[Answer]:
        """Reads slices as of the decision that is held; those of tensors that no decision changes as they are. Raises
        VersionGone, DeadlineExceeded."""
        return await self._read("PULL", transfers, at_least=hold.version, wait_s=wait_s, hold=hold)

    async def without_value(self, transfers: Sequence[Transfer], *, wait_s: float) -> list[Transfer]:
        """The transfers that find a slice without its first value. Waits `wait_s` for first values, and for no step."""
        carry = m.Carry(wait_s=wait_s)
        timeout_s = max(self.timeout_s, wait_s + GRACE_S)
        requests = [
            self._request(
                self.sessions[one.way], "PULL", table=one.table, body=carry, destination=one.memory, timeout_s=timeout_s
            )
            for one in transfers
        ]
        answers = zip(transfers, await collect(requests), strict=True)
        return [transfer for transfer, answer in answers if answer.table.has_status(NotInitialised.code)]

    # ---- for those who send requests of data themselves ----

    def keep_cancelled(self) -> None:
        """What is to be sent for futures that were cancelled is kept: arrays are their owners' again."""
        for session in self.sessions:
            session.core.keep_cancelled()

    @property
    def may_push(self) -> bool:
        """True if a push may be sent at once: the client has joined, no scale has to be found first, and no commit to
        be asked for again."""
        return self.joined and self.unscaled is None and not self.is_sealed

    def may_pull(self, ways: Set[int], *, trained: bool) -> bool:
        """The same; nor has any shard to be told of a decision but those that they lead to. `trained`: see `pull`."""
        if self._torn is not None or self.unscaled is not None or (trained and not self.is_current):
            return False
        if len(ways) == len(self.sessions):
            return True
        asked = {self.sessions[way].shard for way in ways}
        return all(session.shard in asked for session in self._behind())

    @property
    def owes_decisions(self) -> bool:
        """Some shard to which not every call leads may lack the last decision, or its scale."""
        return len(self.sessions) > 1 and bool(self._behind())

    def ask_to_stage(self, transfer: Transfer, future: Future) -> None:
        """`push` of a frame; the future is told the answer. REQUIRES: `may_push`."""
        session = self.sessions[transfer.way]
        self._ask(
            session, "PUSH", future, table=transfer.table, body=m.Carry(), payload=transfer.memory, round=self.round
        )
        self._driver.flush(session)

    def ask_to_read(self, transfers: Sequence[Transfer], futures: Sequence[Future], *, wait_s: float) -> None:
        """`pull` of these frames; the futures are told the answers. REQUIRES: `may_pull` where they lead."""
        wait_s = 0.0 if self._torn is not None else wait_s
        carry = m.Carry(at_least=self.decision, wait_s=wait_s)
        timeout_s = wait_s + GRACE_S
        for transfer, future in zip(transfers, futures, strict=True):
            session = self.sessions[transfer.way]
            memory = transfer.memory
            self._ask(
                session, "PULL", future, table=transfer.table, body=carry, destination=memory, timeout_s=timeout_s
            )
        self._flush()

    async def answers(self, futures: Sequence[Future]) -> list[Answer]:
        """The answers to requests of slices. Raises the first failure of a request or a slice, after all have ended."""
        answers, error = await _ended(futures)
        self.check(answers, error)
        return answers

    def check(self, answers: Sequence[Answer | _core.Frame], error: BaseException | None) -> None:
        """Raises what a request of slices has failed with, if it is not None, or else the first failure of a slice."""
        try:
            if error is not None:
                raise error
            check(answers, self._names)
        except DeadlineExceeded:
            if self._torn is not None:
                raise TornRound(self._torn.message, **self._torn.details) from None
            raise

    # ---- how ----

    async def _hold_on(self, *, state: bool) -> tuple[int, list[int]]:
        """Has every shard keep what it is from now on. Returns the reader's number, and where each shard is."""
        self._num_holds += 1
        digest = hashlib.blake2b(f"{self.identity.client} {self._num_holds}".encode(), digest_size=8).digest()
        reader = int.from_bytes(digest, "little") | 1  # not 0
        try:
            return reader, await self._ask_to_hold(reader, state=state)
        except BaseException:
            self.free(reader)
            raise

    async def _ask_to_hold(self, reader: int, *, state: bool) -> list[int]:
        """Where each shard is. One that holds for that reader already does so for longer."""
        asked = [self._request(one, "HOLD", round=int(state), sequence=reader) for one in self.shards]
        return [answer.version for answer in await collect(asked)]

    async def _keep_holding(self, reader: int, version: int | None) -> None:
        """While workers hand in, until the decision is made as of which they do, the shards keep whatever comes; from
        then on, that decision."""
        if version is None:
            await self._ask_to_hold(reader, state=True)
        else:
            await self._learn_up_to(version)
            await self._settle(Hold(reader, version), wait_s=self.timeout_s)

    async def _settle(self, hold: Hold, *, wait_s: float) -> None:
        """The shards keep that decision, and no other one, and as long again."""
        carry = m.Carry(at_least=hold.version, wait_s=wait_s)
        asked = [
            self._request(one, "PULL", body=carry, timeout_s=wait_s + GRACE_S, round=hold.version, sequence=hold.reader)
            for one in self.shards
        ]
        await collect(asked)

    async def _send(self, op: str, transfers: Iterable[Transfer], *, body: m.Message | None) -> None:
        futures: list[Future] = []
        try:
            for transfer in transfers:
                session = self.sessions[transfer.way]
                round = self.round if op == "PUSH" else 0
                future = self._driver.future()
                self._ask(session, op, future, table=transfer.table, body=body, payload=transfer.memory, round=round)
                futures.append(future)
                if op != "PUSH" or self._unfinished or not session.shares_memory:
                    self._driver.flush(session)  # others are copied and only staged: the shard need not wake for each
            self._flush()
            answers = await collect(futures)
        except BaseException:
            for future in futures:
                future.cancel()
            self.keep_cancelled()
            raise
        check(answers, self._names)

    async def _read(
        self,
        op: str,
        transfers: Iterable[Transfer],
        *,
        at_least: int | None,
        wait_s: float,
        hold: Hold | None = None,
    ) -> list[Answer]:
        _check_wait(wait_s)
        if self._torn is not None:
            wait_s = 0.0  # what is not there by now will never be
        carry = m.Carry(at_least=self.decision if at_least is None else at_least, wait_s=wait_s)
        transfers = list(transfers)
        asked = {self.sessions[transfer.way].shard for transfer in transfers}
        told = self._tell([s for s in self._behind() if s.shard not in asked], timeout_s=wait_s + GRACE_S)
        futures = [
            self._ask(
                self.sessions[transfer.way],
                op,
                self._driver.future(),
                table=transfer.table,
                body=carry,
                destination=transfer.memory,
                ids=transfer.ids,
                timeout_s=wait_s + GRACE_S,
                round=0 if hold is None else hold.version,
                sequence=0 if hold is None else hold.reader,
            )
            for transfer in transfers
        ]
        self._flush()
        return (await self.answers([*told, *futures]))[len(told) :]

    async def _learn_decisions(self) -> int:
        """The last decision that anybody was told of, known here from now on. The coordinator's own shard is at it, and
        says so in any answer; that and all before it are asked for only if another shard may lack it."""
        first = self.shards[0]
        await self._request(first, "PULL", body=m.Carry())
        await self._learn_up_to(first.version)
        return self.version

    async def _learn_up_to(self, version: int) -> None:
        """Asks for the decisions up to that one, if another shard may lack one of them."""
        if self.version < version:
            asked = m.Decisions(since=self._decisions.last)
            decided = await self._control("DECISIONS", asked, m.Decided)
            self._decisions.learn(decided.last, decided.decisions)
            self._forget_applied()

    def _forget_applied(self) -> None:
        """Drops the decisions that every shard has said to be at."""
        for session in self.sessions:
            self._decisions.heard(session.shard, session.core.version)

    def _behind(self) -> list[Session]:
        """The sessions whose shard may lack the last decision, or its scale."""
        scaled = self._decisions.scale.decision if self._decisions.scale is not None else 0
        last, told = self._decisions.carried.last, set[int]()
        for session in self.sessions:
            if session.core.version >= last and session.core.scaled >= scaled:
                told.add(session.shard)
        return [] if len(told) == len(self.shards) else [s for s in self.shards if s.shard not in told]

    def _tell(self, sessions: Sequence[Session], *, timeout_s: float | None = None) -> list[Future]:
        """Sends each shard a PULL of nothing, which carries the decisions that the shard may lack."""
        return [self._request(s, "PULL", body=m.Carry(), timeout_s=timeout_s) for s in sessions]

    async def _attest(self) -> tuple[m.Signed, ...]:
        """What each shard says to have applied: all there is, also where this worker has read and pushed nothing."""
        await collect(self._tell(self._behind()))
        replies = await collect([self._request(session, "ATTEST") for session in self.shards])
        return tuple(reply.applied for reply in replies)

    async def _measure(self, present: Ranges) -> tuple[m.Signed, ...]:
        """What each shard has measured of this round's contribution."""
        asked = m.Attest(round=self.round, present=present)
        if self._measured is None or self._measured[0] != asked:
            replies = await collect([self._request(session, "ATTEST", body=asked) for session in self.shards])
            self._measured = asked, tuple(reply.measured for reply in replies)
        return self._measured[1]

    async def _tell_scale(self) -> None:
        """Tells the shards the last decision's scale. Each has to have it before the next round is committed: with the
        next decision comes the scale of that, and nobody would bring the old one any more."""
        await collect(self._tell(self._behind()))

    async def _define(self, facts: Sequence[m.Signed]) -> None:
        if facts:
            body = m.Define(facts=tuple(facts))
            await collect([self._request(session, "DEFINE", body=body) for session in self.shards])

    async def _control(self, op: str, body: m.Message, kind: type[T]) -> T:
        return _expect(kind, await self._request(self.sessions[0], op, body=body))

    async def _coordinate(self, op: str, body: m.Message, *, wait_s: float) -> object:
        """A request that waits for other workers. Once there is nothing to wait for any more, reads don't, either."""
        session = self.sessions[0]
        answer, now = self._driver.future(), self._driver.now()
        session.request(op, answer, now=now, timeout_s=wait_s + GRACE_S, body=body)
        self.waits_since = now
        if self.on_wait is not None:
            self.on_wait()
        self._driver.await_answer(session)
        try:
            return await answer
        except TornRound as torn:
            self._torn = torn
            for session in self.sessions:
                session.abandon_reads(torn)
                self._driver.flush(session)
            raise
        finally:
            self.waits_since = None

    def _request(self, session: Session, op: str, *, timeout_s: float | None = None, **parts: Any) -> Future:
        future = self._ask(session, op, self._driver.future(), timeout_s=timeout_s, **parts)
        self._driver.flush(session)
        return future

    def _ask(
        self, session: Session, op: str, future: Future, *, timeout_s: float | None = None, **parts: Any
    ) -> Future:
        """A request that goes with the next flush."""
        chosen = self.timeout_s if timeout_s is None else timeout_s
        session.request(op, future, now=self._driver.now(), timeout_s=chosen, **parts)
        return future

    def _flush(self) -> None:
        for session in self.sessions:
            self._driver.flush(session)

    def _learn(self, signed: Sequence[m.Signed]) -> list[Tensor]:
        """What the coordinator sent us is believed: the connection is authenticated, the MAC is for shards."""
        tensors = []
        for fact in map(m.decode_fact, (one.blob for one in signed)):
            if not isinstance(fact, Tensor):
                raise BadBody("the coordinator sent a fact that is no tensor where tensors belong")
            self._names[fact.id] = fact.spec.name
            tensors.append(fact)
        return tensors

    def _forget(self, signed: Sequence[m.Signed]) -> None:
        for fact in map(m.decode_fact, (one.blob for one in signed)):
            if not isinstance(fact, m.DropFact):
                raise BadBody("the coordinator sent a fact that drops nothing where such facts belong")
            self._dropped.extend(fact.ids)
        while len(self._dropped) > MAX_DROPPED_NAMES:
            self._names.pop(self._dropped.popleft(), None)

    def need_worker(self, what: str) -> None:
        if not self.joined:
            raise NotAWorker(f"{what} needs a worker: connect with role='worker' (the default), and before leave()")

    def _need_scale(self, what: str) -> None:
        if self.unscaled is not None:
            raise BadArgument(
                f"{what}: round {self.unscaled.number} is clipped, and its norm was not asked for; do that first"
            )


def _until(
    deadline: float, now: Callable[[], float], pause: Callable[[float], Awaitable[object]], why: str
) -> Callable[[], Awaitable[None]]:
    """What to await before something is asked again: a pause, or DeadlineExceeded that says why."""

    async def again() -> None:
        if now() > deadline:
            raise DeadlineExceeded(why)
        await pause(LOOK_S)

    return again


def _check_wait(wait_s: float) -> None:
    if not 0.0 <= wait_s <= m.MAX_WAIT_S:
        raise BadArgument(f"wait_s is {wait_s}; it must be from 0 to {m.MAX_WAIT_S:g} seconds")


def _expect(kind: type[T], reply: object) -> T:
    if not isinstance(reply, kind):
        raise BadBody(f"the coordinator answered with {type(reply).__name__}, not {kind.__name__}")
    return reply


async def collect(futures: Sequence[Future]) -> list[Any]:
    """All results, in order. If some fail, waits for the rest, then raises the first failure."""
    results, first = await _ended(futures)
    if first is not None:
        raise first
    return results


async def _ended(futures: Sequence[Future]) -> tuple[list[Any], PsstoreError | None]:
    """All results, in order, and the first failure; waits for all of them. If it is interrupted, what still comes goes
    nowhere."""
    results = []
    first: PsstoreError | None = None
    try:
        for future in futures:
            try:
                results.append(await future)
            except PsstoreError as error:
                first = first or error
    except BaseException:
        for future in futures:
            future.cancel()
        raise
    return results, first
