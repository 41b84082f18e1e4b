"""Shard 0 in its second role: the schema registry, the members, the decisions. It holds no tensors.

Every handler answers with replies for any connection: a commit may release others that waited. A request
that comes again gets the answer that the first one got.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from msgspec.structs import replace

from psstore.errors import BadSignature, MissingContribution, PsstoreError, UnexpectedMessage
from psstore.protocol.barriers import Barriers
from psstore.protocol.clients import Clients
from psstore.protocol.hand_ins import HandIns
from psstore.protocol.membership import Liveness, Membership, Worker
from psstore.protocol.promised_pushes import Finishing
from psstore.protocol.replies import Reply
from psstore.protocol.roster import Roster
from psstore.protocol.rounds import Rounds, Waiting
from psstore.protocol.schema_registry import SchemaRegistry
from psstore.protocol.signing import Signer
from psstore.protocol.states import WorkerState
from psstore.types import Consistency
from psstore.wire.messages import (
    AppliedFact,
    Barrier,
    Commit,
    Create,
    Decided,
    Decisions,
    Describe,
    Drop,
    Finish,
    HandBack,
    HandIn,
    Join,
    Joined,
    Message,
    Ready,
    Signed,
    Stop,
    Stopped,
    TicketFact,
)

NEEDS_WHOLE_ROUNDS = frozenset((Finish, Barrier, Join))
"""Requests that stand on the round before. So does a COMMIT, behind what it brings, which may tear that."""


class Coordinator:
    """Dispatches control requests. `now` is any monotonic clock in seconds."""

    def __init__(
        self,
        *,
        consistency: Consistency,
        liveness: Liveness,
        num_shards: int,
        signer: Signer,
        max_bytes: int | None = None,
        max_handed_bytes: int | None = None,
    ) -> None:
        """`max_bytes`: that the values of all tensors may take together, if that is known. `max_handed_bytes`: what
        workers hand in may."""
        consistency.check()
        self.consistency = consistency
        self.membership = Membership(
            num_workers=consistency.num_workers, liveness=liveness, elastic=consistency.elastic
        )
        self.roster = Roster(self.membership, fewest=consistency.fewest)
        self.schemas = SchemaRegistry(
            num_shards=num_shards, signer=signer, consistency=consistency, max_bytes=max_bytes
        )
        self.rounds = Rounds(
            consistency=consistency,
            membership=self.membership,
            signer=signer,
            num_shards=num_shards,
            groups=self.schemas.groups,
            hand_ins=HandIns(self.membership, max_bytes=max_handed_bytes),
            roster=self.roster,
        )
        self._signer = signer
        self._clients = Clients()
        self._barriers = Barriers(self.membership)

    # ---- connections ----

    def attached(self, conn: int, client: str, now: float) -> None:
        self._clients.attached(conn, client)
        self.membership.attach(client=client, conn=conn, now=now)

    def detached(self, conn: int, now: float) -> None:
        self._clients.detached(conn, now)
        self.membership.detach(conn, now)
        self.roster.detached(conn)

    def heartbeat(self, conn: int, *, client: str, rank: int, incarnation: int, now: float) -> None:
        self.membership.heartbeat(client=client, rank=rank, incarnation=incarnation, conn=conn, now=now)

    def all_went(self, now: float) -> None:
        """The process that had the connections is gone, and this one has none of them yet."""
        for conn in {*self._clients.connections, *self.membership.connections}:
            self.detached(conn, now)
        self.membership.all_went(now)
        self.rounds.hand_ins.enough()  # who wrote checkpoints there begins again

    # ---- what shards say ----

    def applied(self, fact: AppliedFact, now: float) -> list[Reply]:
        """A shard has applied a decision, and found these contributions missing: their workers may not go on."""
        self.rounds.log.applied(fact.shard, fact.decision)
        if not fact.missing:
            return []
        replies: list[Reply] = []
        for rank, incarnation, round in fact.missing:
            worker = self.membership.workers.get(rank)
            if worker is None or worker.incarnation != incarnation:
                continue
            if worker.state in (WorkerState.REFUSED, WorkerState.LEFT):
                continue  # nobody waits for it any more, or all have heard why
            refusal = MissingContribution(
                f"rank {rank} committed round {round} with tensors of which shard {fact.shard} has no gradient from it;"
                " they counted as absent, and this worker may not go on: name only what was acknowledged, and connect"
                " again",
                rank=rank,
                round=round,
                shard=fact.shard,
            )
            self.membership.refuse(worker, refusal, now)
            replies += self.rounds.refused(worker, refusal, now) + self._move_barriers(None)
        return replies + self._give_up(now) + self._let_in(now)

    def _attested(self, signed: Sequence[Signed], now: float) -> list[Reply]:
        """What shards have applied, as workers carry it. Raises BadSignature."""
        facts = [self._signer.open(one) for one in signed]
        replies: list[Reply] = []
        for fact in facts:
            if not isinstance(fact, AppliedFact):
                raise BadSignature("COMMIT carries a fact that no shard says of itself")
            replies += self.applied(fact, now)
        return replies

    # ---- requests ----

    def handle(self, conn: int, request: int, message: Message | None, *, client: str, now: float) -> list[Reply]:
        """`message`: a decoded body; None stands for LEAVE, which has none. Raises PsstoreError for this request."""
        replies = self._handle(conn, request, message, client, now)
        return replies + self._let_in(now) if self.roster.is_elastic else replies

    def _handle(self, conn: int, request: int, message: Message | None, client: str, now: float) -> list[Reply]:
        if type(message) in NEEDS_WHOLE_ROUNDS:
            self.rounds.refuse_if_torn()
        match message:
            case Commit():
                told = self._attested(message.applied, now) if message.applied else []
                return told + self._commit(client, Waiting(message, conn, request, now))
            case Finish():
                return self.rounds.finish(self._worker(client, now), Finishing(message, conn, request, now))
            case Barrier():
                worker = self._worker(client, now)
                return self._barriers.enter(worker, message, conn=conn, request=request, now=now)
            case Join():
                return self._arrived(conn, request, message, client, now)
            case Decisions():
                decisions = self.rounds.log.since(message.since)
                return [Reply(conn, request, Decided(last=self.rounds.log.last, decisions=decisions))]
            case HandIn():
                worker, last = self._worker(client, now), self.rounds.log.last
                take = partial(self.rounds.hand_ins.take, worker, message, last=last)
                return [Reply(conn, request, self._clients.once(client, request, take))]
            case HandBack():
                back = self.rounds.hand_ins.give_back(self._worker(client, now), message.offset)
                return [Reply(conn, request, back)]
            case Stop():
                worker = self._worker(client, now)
                told = self._stop(worker, message, now)
                return [Reply(conn, request, Stopped(stop=self.rounds.is_over(worker.rank))), *told]
            case None:
                return [Reply(conn, request, None), *self._leave(client, now)]
            case Create():
                create = partial(self.schemas.create, client, message, is_gone=self._is_gone(now))
                return [Reply(conn, request, self._clients.once(client, request, create))]
            case Ready():
                self.schemas.ready(message.ids)
                return [Reply(conn, request, None)]
            case Describe():
                found = self.schemas.names() if message.names_only else self.schemas.describe(message.names)
                return [Reply(conn, request, found)]
            case Drop():
                drop = partial(self.schemas.drop, message.names)
                return [Reply(conn, request, self._clients.once(client, request, drop))]
        raise UnexpectedMessage(f"the coordinator has no answer to {type(message).__name__}")

    def tick(self, now: float) -> list[Reply]:
        """What time alone brings: lost workers and ended waits."""
        replies: list[Reply] = []
        lost = self.membership.sweep(now)
        if lost:
            replies += self.rounds.lost(lost, now) + self._move_barriers(None)
        replies += self._give_up(now) + self.rounds.expire(now) + self._barriers.expire(now)
        replies += self.roster.expire(now, awaited=lambda: self.rounds.awaited)
        return replies + self._let_in(now)

    def next_wake(self) -> float | None:
        """When `tick` may next do something."""
        times = [self.membership.next_wake(), self.rounds.next_wake(), self._barriers.next_wake()]
        if self.roster.is_elastic:
            times.append(self.roster.next_wake())
        return min((t for t in times if t is not None), default=None)

    # ---- membership ----

    def _worker(self, client: str, now: float) -> Worker:
        worker = self.membership.worker_of(client)
        self.membership.seen(worker, now)
        return worker

    def _commit(self, client: str, waiting: Waiting) -> list[Reply]:
        """What is wrong is a reply like others: what the commit has brought is told to those concerned all the same."""
        try:
            self.rounds.refuse_if_torn()
            return self.rounds.commit(self._worker(client, waiting.since), waiting)
        except PsstoreError as error:
            return [waiting.reply(error)]

    def _arrived(self, conn: int, request: int, join: Join, client: str, now: float) -> list[Reply]:
        """A worker comes. Where others come and go, too, it waits until the open round is decided."""
        self.membership.somebody_comes(now)
        known = self.membership.find(client)
        is_new = known is None or known.state is WorkerState.LEFT
        may_wait = self.roster.is_elastic and is_new and not self._is_late(join)
        if may_wait and self.roster.arrived(join, client=client, conn=conn, request=request, now=now):
            return self.rounds.settle(now)
        return self._join(conn, request, join, client, now)

    def _is_late(self, join: Join) -> bool:
        """Whether it takes the place of a life in a group that has ended."""
        return join.goes_on and self.membership.has_ended

    def _let_in(self, now: float) -> list[Reply]:
        """Tells those who may train from now on: once the round before is done, as the others are told."""
        if self.rounds.torn is not None:
            return self.roster.fail(self.rounds.torn)
        if not self.rounds.is_done:
            return []
        self.roster.begin(self.rounds.log.last)
        replies: list[Reply] = []
        for one in self.roster.take_let_in():
            replies += self._join(one.conn, one.request, replace(one.join, rank=one.rank), one.client, now)
        return replies

    def _join(self, conn: int, request: int, join: Join, client: str, now: float) -> list[Reply]:
        before = self.membership.find(client)
        is_late = self._is_late(join)
        worker = self.membership.join(
            client=client,
            conn=conn,
            rank=join.rank,
            announced=join.num_workers,
            clock=self.rounds.first_clock(),
            now=now,
            goes_on=join.goes_on,
        )
        told: list[Reply] = []
        if worker is not before:
            self._barriers.forget(worker.rank)
            told = self.rounds.replaced(worker.rank)
            told += self.rounds.end(self.rounds.log.last, now) if is_late else []
        if self.rounds.torn is not None:  # by this one's taking the rank over
            return [*told, *self._move_barriers(now), Reply(conn, request, self.rounds.torn)]
        ticket = TicketFact(client=client, rank=worker.rank, incarnation=worker.incarnation)
        members = self.roster.since(join.members)
        joined = Joined(
            rank=worker.rank,
            incarnation=worker.incarnation,
            round=worker.clock + 1,
            decision=self.rounds.log.last,
            decisions=self.rounds.log.since(0),
            ticket=self._signer.sign(ticket),
            members=members,
            more=bool(members) and join.members + len(members) < len(self.roster.log),
            stop=self.rounds.is_over(worker.rank),
        )
        return [Reply(conn, request, joined), *told]

    def _stop(self, worker: Worker, stop: Stop, now: float) -> list[Reply]:
        if stop.version is None:
            return self.rounds.end(self.rounds.log.last + (stop.finish and self.consistency.lockstep), now)
        if stop.everyone:
            return self.rounds.end(stop.version, now)
        return self.rounds.limit(worker.rank, stop.version, now)

    def _leave(self, client: str, now: float) -> list[Reply]:
        """Leaving twice, or without having joined, is no error: the caller wants to be gone and is."""
        worker = self.membership.find(client)
        if worker is None:
            return []
        self.membership.leave(worker)
        return self.rounds.leave(worker, now) + self._move_barriers(None)

    def _give_up(self, now: float) -> list[Reply]:
        """Nobody took a lost one's place in time: it is done without, or who can't go on hears so."""
        if not self.membership.give_up(now) or self.membership.liveness.lost == "wait":
            return []
        if self.membership.liveness.lost == "fail":
            return self.rounds.complain(now) + self._move_barriers(now)
        replies: list[Reply] = []
        for worker in self.membership.given_up():
            self.membership.drop(worker, had_ended=self.rounds.is_over(worker.rank))
            replies += self.rounds.leave(worker, now) + self._move_barriers(None)
        return replies

    def _move_barriers(self, now: float | None) -> list[Reply]:
        """Opens or fails barriers after a worker's end. `now`: None if it was not given up."""
        return self._barriers.open(now) if self.rounds.torn is None else self._barriers.fail(self.rounds.torn)

    def _is_gone(self, now: float) -> Callable[[str], bool]:
        return partial(self._clients.is_gone, now=now, patience_s=self.membership.liveness.detached_s)

    def _waited_for(self, now: float, client: str) -> str:
        """Which workers others wait for, described; '': nobody waits. A worker that asks, and is at a barrier itself,
        hears who is missing there, and not for whom another waits."""
        worker = self.membership.find(client)
        own = "" if worker is None else self._barriers.waited_for(now, by=worker.rank)
        return own or self.rounds.waited_for(now) or self._barriers.waited_for(now)

    def counters(self, now: float, *, client: str = "") -> dict[str, int | float | str]:
        """For STATS, as `client` hears it. Ranks are listed as text: '0,2', and what is known of each likewise:
        '0:12,2:11'. Who was there before this life of the store, and has not come back, is lost here: nobody knows
        better."""
        workers, awaited = self.membership.workers, self.membership.awaited
        live = sorted(rank for rank in self.membership.live if rank not in awaited)
        lost = sorted({*(worker.rank for worker in self.membership.lost()), *awaited})
        counters: dict[str, int | float | str] = {
            "decisions": self.rounds.log.last,
            "decision_log": len(self.rounds.log),
            "max_staleness": self.rounds.max_staleness,
            "tensors": len(self.schemas.names().names),
            "worker_changes": self.membership.num_changes,
            "workers_live": len(live),
            "workers_lost": len(lost),
            "commits_waiting": self.rounds.num_waiting,
            "waited_for": self._waited_for(now, client),
            "ranks_live": ",".join(map(str, live)),
            "ranks_lost": ",".join(map(str, lost)),
            "ranks_left": ",".join(map(str, sorted(self.membership.left))),
            "ranks_gone": ",".join(map(str, sorted(self.membership.gone))),
            "rank_clocks": ",".join(f"{rank}:{workers[rank].clock}" for rank in live),
            "rank_waits_s": ",".join(f"{rank}:{self.rounds.waited_s(rank, now):.6g}" for rank in live),
            "rank_silences_s": ",".join(f"{rank}:{max(0.0, now - workers[rank].last_seen):.3g}" for rank in live),
            "rank_refusals": ",".join(
                f"{rank}:{count}" for rank, count in sorted(self.rounds.norm_guard.num_refused.items())
            ),
            "staleness": ",".join(f"{ahead}:{count}" for ahead, count in self.rounds.staleness().items()),
        }
        return counters if self.rounds.torn is None else {**counters, "torn": self.rounds.torn.message}
