"""A worker's part in the rounds of a store, from join to leave: commits, barriers, what it hands in, its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from psstore.errors import BadArgument, NotAWorker, TornRound, UsageError
from psstore.protocol.decision_carrier import DecisionCarrier
from psstore.protocol.handshake import ClientIdentity
from psstore.protocol.links import GRACE_S, Links, check_wait, collect, expect
from psstore.wire import messages as m
from psstore.wire.ranges import Ranges, to_ranges

MANY_DECISIONS = 256
"""A worker that is told so many as it joins has the shards attest with its first commit, unasked: a store whose workers
do as they are asked keeps half of that (rounds.py), and those before it may have left instead."""

JOIN_WAIT_S = 300.0
"""How long a worker waits for its first round, where others come and go: a few long steps."""


class Participation:
    """Where one worker is in the store's rounds. A client that never joins has one in which nothing happens."""

    def __init__(self, identity: ClientIdentity, links: Links, carrier: DecisionCarrier) -> None:
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
        self.is_unfinished = False
        """The current round was committed early: its pushes go on until `finish`."""
        self.hand_in_wanted = False
        """A checkpoint is being written of the decision that this worker has come to."""
        self.stopped = False
        """No further commit of this worker will count."""
        self.is_sealed = False
        """A commit was sent that was not early, and what became of it is not known here: nothing more can be pushed for
        the round."""
        self.waits_since: float | None = None
        """When it began to wait for other workers; None: it does not."""
        self.on_wait: Callable[[], None] | None = None
        """Told before each such wait."""
        self.torn: TornRound | None = None
        """Why some slices will never be read again."""
        self._identity = identity
        self._links = links
        self._carrier = carrier
        self._is_measured = False
        """The store wants to know what shards have measured of contributions."""
        self._measured: tuple[m.Attest, tuple[m.Signed, ...]] | None = None
        """What was asked of this worker's last contribution, and what every shard has measured of it: once it counts
        it is there no longer."""
        self._asked_to_attest = False
        """The coordinator wants to know what the shards have applied."""
        self._unanswered = False
        """A commit was sent, and what became of it is not known here."""
        self._begins_early = False
        """A commit is under way that is early."""
        self._num_barriers = 0

    @property
    def joined(self) -> bool:
        return self._identity.ticket is not None

    @property
    def is_promised(self) -> bool:
        """Whether the round is, or is being, committed early, and goes on until `finish`."""
        return self.is_unfinished or self._begins_early

    @property
    def is_current(self) -> bool:
        """Whether a read shows every decision that anybody was told of, with nobody asked before: there is no decision
        without this worker's commit, or no shard but the coordinator's own."""
        if len(self._links.shards) == 1:
            return True
        welcome = self._links.shards[0].welcome
        needs_us = welcome is not None and welcome.quorum == welcome.num_workers
        return self.joined and needs_us and not self._unanswered

    @property
    def unscaled(self) -> m.DecisionFact | None:
        """The last decision, if it clips and its scale is not known here: somebody has to ask for the `norm` and
        `set_scale`, and every worker of the round does, whatever became of the others. Also true of a decision that
        was made before this client joined. None for a reader, whom no shard would believe."""
        return self._carrier.known.unscaled if self._identity.incarnation else None

    # ---- coming and going ----

    async def join(
        self, *, rank: int | None, num_workers: int | None, wait_s: float = JOIN_WAIT_S, goes_on: bool = False
    ) -> None:
        """Becomes a worker and attaches to every shard. `wait_s`: how long for the end of the open round, where workers
        come and go. `goes_on`: in the place of a life that failed. Raises RankTaken, TooManyWorkers, BadArgument,
        DeadlineExceeded."""
        check_wait(wait_s)
        body = m.Join(rank=rank, num_workers=num_workers, wait_s=wait_s, goes_on=goes_on)
        joined = await self._joined(body)
        welcome = self._links.shards[0].welcome
        self._is_measured = welcome is not None and welcome.refuse_norm is not None
        self._identity.rank, self._identity.incarnation = joined.rank, joined.incarnation
        self._identity.ticket = joined.ticket
        self.round, self.decision, self.is_unfinished, self._measured = joined.round, joined.decision, False, None
        self.stopped = joined.stop
        self._asked_to_attest = len(joined.decisions) >= MANY_DECISIONS
        self._carrier.known.learn(joined.decision, joined.decisions)
        for session in self._links.sessions:
            session.identified()
        attach = m.Attach(ticket=joined.ticket)
        await collect([self._links.request(session, "ATTACH", body=attach) for session in self._links.sessions])

    async def _joined(self, body: m.Join) -> m.Joined:
        """The answer, once all is known of who came and went."""
        while True:
            asking = replace(body, members=len(self.member_log))
            asked = self._links.request(self._links.shards[0], "JOIN", body=asking, timeout_s=body.wait_s + GRACE_S)
            joined = expect(m.Joined, await asked)
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
            await self._links.request(self._links.shards[0], "LEAVE")
            self._identity.ticket = None
            for session in self._links.sessions:
                session.identified()

    async def barrier(self, name: str, *, wait_s: float, once: bool = False) -> None:
        """Returns when every expected worker has called it with this name. `once`: a replacement doesn't wait where
        others are past it. Raises WorkerLost, DeadlineExceeded, BadArgument."""
        self.need_joined("barrier")
        check_wait(wait_s)
        if len(name) > m.MAX_BARRIER_CHARS:
            raise BadArgument(f"barrier: the name has {len(name)} characters, expected {m.MAX_BARRIER_CHARS} at most")
        self._num_barriers += 1  # of all names: larger with each call of any
        body = m.Barrier(name=name, count=self._num_barriers, wait_s=wait_s, once=once)
        await self._coordinate("BARRIER", body, wait_s=wait_s)

    # ---- rounds ----

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
        self.need_joined("commit")
        self._need_scale("commit")
        if self.is_unfinished:
            raise BadArgument(f"commit: round {self.round} was committed early; push what it promised, then finish()")
        check_wait(wait_s)
        known = self._carrier.known
        if known.scale is not None:
            await self._carrier.tell_scale()
        self._carrier.forget_applied()
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
            since=known.last,
            applied=applied,
            measured=measured,
            members=len(self.member_log),
            wait_s=wait_s,
        )
        try:
            committed = expect(m.Committed, await self._coordinate("COMMIT", body, wait_s=wait_s))
        except UsageError:
            self.is_sealed = False  # nothing was committed
            raise
        finally:
            self._begins_early = False
        known.learn(committed.last, committed.decisions)
        self._learn_members(committed.members)
        self._unanswered = self.is_sealed = False
        self._asked_to_attest = committed.attest
        self.decision = committed.decision
        self.staleness = max(0, committed.next_round - 1 - committed.slowest)
        self.hand_in_wanted, self.stopped = committed.hand_in, committed.stop
        self.is_unfinished = early and not committed.late
        if not self.is_unfinished:
            self.round = committed.next_round
        return committed

    async def finish(self, *, wait_s: float) -> None:
        """Ends an early committed round, once every push is acknowledged; returns when all members have.

        Raises DeadlineExceeded: it may be called again. Raises TornRound if a member is gone that had not finished:
        reads under way fail with it, too, for what they wait for will not come."""
        self.need_joined("finish")
        if not self.is_unfinished:
            raise BadArgument(f"finish: round {self.round} was not committed early")
        check_wait(wait_s)
        body = m.Finish(round=self.round, wait_s=wait_s)
        finished = expect(m.Finished, await self._coordinate("FINISH", body, wait_s=wait_s))
        self.round, self.is_unfinished = finished.next_round, False

    def set_scale(self, scale: m.Scale) -> None:
        """What the gradients of the last decision are multiplied by: carried to the shards from now on."""
        self._carrier.known.set_scale(scale)

    async def stop(self, version: int | None, *, finish: bool = False, everyone: bool = False) -> None:
        """This worker's commits count up to that decision only, or `everyone`'s. None: nobody's count from now on, or
        `finish` from the next decision on."""
        self.need_joined("stop")
        body = m.Stop(version=version, finish=finish, everyone=everyone)
        self.stopped = (await self._links.ask_coordinator("STOP", body, m.Stopped)).stop

    # ---- what the next life of its rank is to have ----

    async def hand_in(self, state: bytes) -> None:
        """What this rank's next life is to have again, as of the decision that it has come to."""
        self.need_joined("hand_in")
        self.hand_in_wanted = False
        version, size = self._carrier.version, m.HANDED_PIECE_BYTES
        for offset in range(0, max(1, len(state)), size):
            end = offset + size
            body = m.HandIn(version=version, state=state[offset:end], offset=offset, more=end < len(state))
            await self._links.request(self._links.shards[0], "HAND_IN", body=body)

    async def handed_in(self) -> tuple[int, bytes] | None:
        """What was handed in for this rank last, behind its version; None: nothing."""
        self.need_joined("handed_in")
        found = bytearray()
        while True:
            back = await self._links.ask_coordinator("HAND_BACK", m.HandBack(offset=len(found)), m.HandedBack)
            if back.state is None:
                return None
            found += back.state
            if not back.more:
                return back.version, bytes(found)

    # ---- what it may do ----

    @property
    def may_push(self) -> bool:
        """True if a push may be sent at once: the client has joined, no scale has to be found first, and no commit to
        be asked for again."""
        return self.joined and self.unscaled is None and not self.is_sealed

    def check_push(self) -> None:
        """Raises what a push raises before anything is sent."""
        self.need_joined("push")
        self._need_scale("push")
        self.need_open("push")

    def need_open(self, what: str) -> None:
        """Raises BadArgument if the round `is_sealed`."""
        if self.is_sealed:
            raise BadArgument(
                f"{what}: round {self.round} was committed, and what became of it is not known here: commit again,"
                " which waits for that; what is pushed then is of the next round"
            )

    def need_joined(self, what: str) -> None:
        """Raises NotAWorker if it has not joined, or has left."""
        if not self.joined:
            raise NotAWorker(f"{what} needs a worker: connect with role='worker' (the default), and before leave()")

    def _need_scale(self, what: str) -> None:
        if self.unscaled is not None:
            raise BadArgument(
                f"{what}: round {self.unscaled.number} is clipped, and its norm was not asked for; do that first"
            )

    # ---- how ----

    async def _coordinate(self, op: str, body: m.Message, *, wait_s: float) -> object:
        """A request that waits for other workers. Once there is nothing to wait for any more, reads don't, either."""
        links, session = self._links, self._links.shards[0]
        answer, now = links.driver.future(), links.driver.now()
        session.request(op, answer, now=now, timeout_s=wait_s + GRACE_S, body=body)
        self.waits_since = now
        if self.on_wait is not None:
            self.on_wait()
        links.driver.await_answer(session)
        try:
            return await answer
        except TornRound as torn:
            self.torn = torn
            for session in links.sessions:
                session.abandon_reads(torn)
                links.driver.flush(session)
            raise
        finally:
            self.waits_since = None

    async def _attest(self) -> tuple[m.Signed, ...]:
        """What each shard says to have applied: all there is, also where this worker has read and pushed nothing."""
        await collect(self._carrier.tell(self._carrier.behind()))
        replies = await self._links.ask_all("ATTEST")
        return tuple(reply.applied for reply in replies)

    async def _measure(self, present: Ranges) -> tuple[m.Signed, ...]:
        """What each shard has measured of this round's contribution."""
        asked = m.Attest(round=self.round, present=present)
        if self._measured is None or self._measured[0] != asked:
            replies = await self._links.ask_all("ATTEST", body=asked)
            self._measured = asked, tuple(reply.measured for reply in replies)
        return self._measured[1]
