"""Shard 0 in its second role: the catalogue, the members, the decisions. It holds no tensors.

Every handler answers with replies for any connection: a commit may release others that waited. A request
that comes again gets the answer that the first one got.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from psstore.errors import DeadlineExceeded, PsstoreError, UnexpectedMessage, WorkerLost
from psstore.protocol.catalogue import Catalogue
from psstore.protocol.clients import Clients
from psstore.protocol.membership import Liveness, Membership, Worker
from psstore.protocol.rounds import Answer, Rounds, Waiting
from psstore.protocol.signing import Signer
from psstore.types import Consistency
from psstore.wire.messages import (
    Barrier,
    Commit,
    Create,
    Describe,
    Drop,
    Join,
    Joined,
    Message,
    Ready,
    TicketFact,
)


@dataclass(frozen=True)
class Reply:
    """The answer to one request. `result`: a body, None for an empty one, or the error."""

    conn: int
    request: int
    result: Message | PsstoreError | None


@dataclass(frozen=True)
class AtBarrier:
    conn: int
    request: int
    incarnation: int
    barrier: Barrier
    since: float


class Coordinator:
    """Dispatches control requests. `now` is any monotonic clock in seconds."""

    def __init__(self, *, consistency: Consistency, liveness: Liveness, num_shards: int, signer: Signer) -> None:
        consistency.check()
        self.consistency = consistency
        self.membership = Membership(num_workers=consistency.num_workers, liveness=liveness)
        self.catalogue = Catalogue(num_shards=num_shards, signer=signer)
        self.rounds = Rounds(
            consistency=consistency,
            membership=self.membership,
            signer=signer,
            rule_of_group=self.catalogue.rule_of_group,
        )
        self._signer = signer
        self._clients = Clients()
        self._barriers: dict[str, dict[int, AtBarrier]] = {}
        self._passed: dict[tuple[str, int], tuple[int, int]] = {}
        """(barrier, rank) -> (incarnation, count) that it last passed."""

    # ---- connections ----

    def attached(self, conn: int, client: str, now: float) -> None:
        self._clients.attached(conn, client)
        self.membership.attach(client=client, conn=conn, now=now)

    def detached(self, conn: int, now: float) -> None:
        self._clients.detached(conn, now)
        self.membership.detach(conn, now)

    def heartbeat(self, conn: int, *, rank: int, incarnation: int, now: float) -> None:
        self.membership.heartbeat(rank=rank, incarnation=incarnation, conn=conn, now=now)

    # ---- requests ----

    def handle(self, conn: int, request: int, message: Message | None, *, client: str, now: float) -> list[Reply]:
        """`message`: a decoded body; None stands for LEAVE, which has none. Raises PsstoreError for this request."""
        match message:
            case Commit():
                worker = self._worker(client, now)
                return self._replies(self.rounds.commit(worker, Waiting(message, conn, request, now)))
            case Barrier():
                return self._barrier(conn, request, message, self._worker(client, now), now)
            case Join():
                return [Reply(conn, request, self._join(conn, message, client, now))]
            case None:
                return [Reply(conn, request, None), *self._leave(client)]
            case Create():
                create = partial(self.catalogue.create, client, message, is_gone=self._is_gone(now))
                return [Reply(conn, request, self._clients.once(client, request, create))]
            case Ready():
                self.catalogue.ready(message.ids)
                return [Reply(conn, request, None)]
            case Describe():
                found = self.catalogue.names() if message.names_only else self.catalogue.describe(message.names)
                return [Reply(conn, request, found)]
            case Drop():
                drop = partial(self.catalogue.drop, message.names)
                return [Reply(conn, request, self._clients.once(client, request, drop))]
        raise UnexpectedMessage(f"the coordinator has no answer to {type(message).__name__}")

    def tick(self, now: float) -> list[Reply]:
        """What time alone brings: lost workers and ended waits."""
        replies: list[Reply] = []
        if self.membership.sweep(now):
            replies += self._replies(self.rounds.lost(now))
            replies += self._pass_barriers(now)
        replies += self._replies(self.rounds.expire(now))
        replies += self._expire_barriers(now)
        return replies

    def next_wake(self) -> float | None:
        """When `tick` may next do something."""
        ends = [at.since + at.barrier.wait_s for waits in self._barriers.values() for at in waits.values()]
        times = [t for t in (self.membership.next_wake(), self.rounds.next_wake(), *ends) if t is not None]
        return min(times, default=None)

    # ---- membership ----

    def _worker(self, client: str, now: float) -> Worker:
        worker = self.membership.worker_of(client)
        self.membership.seen(worker, now)
        return worker

    def _join(self, conn: int, join: Join, client: str, now: float) -> Joined:
        before = {worker.rank: worker.incarnation for worker in self.membership.workers.values()}
        worker = self.membership.join(
            client=client,
            conn=conn,
            rank=join.rank,
            announced=join.num_workers,
            clock=self.rounds.first_clock(),
            now=now,
        )
        if before.get(worker.rank) != worker.incarnation:
            self.rounds.replaced(worker.rank)
            self._leave_barriers(worker.rank)
        ticket = TicketFact(client=client, rank=worker.rank, incarnation=worker.incarnation)
        return Joined(
            rank=worker.rank,
            incarnation=worker.incarnation,
            round=worker.clock + 1,
            decision=self.rounds.decided,
            decisions=self.rounds.since(0),
            ticket=self._signer.sign(ticket),
        )

    def _leave(self, client: str) -> list[Reply]:
        """Leaving twice, or without having joined, is no error: the caller wants to be gone and is."""
        for worker in self.membership.workers.values():
            if worker.client == client:
                self.membership.leave(worker)
                return self._replies(self.rounds.leave(worker)) + self._pass_barriers(None)
        return []

    def _is_gone(self, now: float) -> Callable[[str], bool]:
        return partial(self._clients.is_gone, now=now, patience_s=self.membership.liveness.detached_s)

    @staticmethod
    def _replies(answers: Sequence[Answer]) -> list[Reply]:
        return [Reply(answer.conn, answer.request, answer.result) for answer in answers]

    # ---- barriers ----

    def _barrier(self, conn: int, request: int, barrier: Barrier, worker: Worker, now: float) -> list[Reply]:
        incarnation, count = self._passed.get((barrier.name, worker.rank), (0, 0))
        if incarnation == worker.incarnation and barrier.count <= count:
            return [Reply(conn, request, None)]
        at = AtBarrier(conn, request, worker.incarnation, barrier, now)
        self._barriers.setdefault(barrier.name, {})[worker.rank] = at
        return self._pass_barriers(now)

    def _leave_barriers(self, rank: int) -> None:
        """A rank starts a new life: it was the old one that had come to a barrier."""
        for waits in self._barriers.values():
            waits.pop(rank, None)

    def _pass_barriers(self, now: float | None) -> list[Reply]:
        """Opens every barrier at which all expected workers are, and tells those who wait for a lost one."""
        replies = []
        expected = self.membership.expected()
        lost = {worker.rank: worker for worker in self.membership.lost()}
        for name, waits in list(self._barriers.items()):
            missing = expected - set(waits)
            if not missing:
                for rank, at in waits.items():
                    self._passed[name, rank] = (at.incarnation, at.barrier.count)
                    replies.append(Reply(at.conn, at.request, None))
                del self._barriers[name]
            elif now is not None and missing & lost.keys():
                rank = min(missing & lost.keys())
                error = WorkerLost(
                    f"barrier {name!r} needs {self.membership.describe(rank, now)}, which is lost",
                    rank=rank,
                    last_seen_s=now - lost[rank].last_seen,
                )
                replies += [Reply(at.conn, at.request, error) for at in waits.values()]
                del self._barriers[name]
        return replies

    def _expire_barriers(self, now: float) -> list[Reply]:
        replies = []
        for name, waits in list(self._barriers.items()):
            missing = sorted(self.membership.expected() - set(waits))
            who = ", ".join(self.membership.describe(rank, now) for rank in missing)
            for rank, at in list(waits.items()):
                if at.since + at.barrier.wait_s <= now:
                    text = f"rank {rank} waited {at.barrier.wait_s:g} s at barrier {name!r} for {who}"
                    replies.append(Reply(at.conn, at.request, DeadlineExceeded(text, waited_s=at.barrier.wait_s)))
                    del waits[rank]
            if not waits:
                del self._barriers[name]
        return replies

    def counters(self) -> dict[str, int | float | str]:
        """For STATS."""
        workers = list(self.membership.workers.values())
        return {
            "decisions": self.rounds.decided,
            "decision_log": self.rounds.log_length,
            "max_staleness": self.rounds.max_staleness,
            "workers_live": sum(worker.life.value == "live" for worker in workers),
            "workers_lost": sum(worker.life.value == "lost" for worker in workers),
        }
