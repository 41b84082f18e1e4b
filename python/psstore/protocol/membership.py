"""Who the workers are: ranks, incarnations, and who is live, lost or has left. Part of the coordinator.

What is asked at each commit and heartbeat is kept up to date instead of being looked for among all workers: there may
be thousands, and each of them asks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from psstore.errors import (
    BadArgument,
    MissingContribution,
    NotAWorker,
    RankTaken,
    StaleIncarnation,
    TooManyWorkers,
)
from psstore.protocol.earliest import Earliest
from psstore.protocol.states import WORKER, WorkerEvent, WorkerState

LIVE, LOST, LEFT = WorkerState.LIVE, WorkerState.LOST, WorkerState.LEFT
"""An enum's attribute costs more than a comparison with it, and each request asks for its worker's state."""


OfLost = Literal["fail", "wait", "drop"]


@dataclass(frozen=True, kw_only=True)
class Liveness:
    """When silence becomes loss, in seconds."""

    heartbeat_s: float = 1.0
    """How often a worker's native thread says that it lives."""
    silence_s: float = 10.0
    """A worker that says nothing for so long is lost. Ten heartbeats, so that a scheduling hiccup is not a death."""
    detached_s: float = 3.0
    """A worker without a connection for so long is lost. Shorter than `silence_s`, since a killed process closes its
    sockets at once, and long enough for a client's first reconnects (0.05 s, doubling)."""
    rejoin_s: float = 0.0
    """A lost worker is given up when for so long no other life has taken its rank."""
    lost: OfLost = "fail"
    """What becomes of one that is given up. 'fail': those who wait for it are told. 'wait': they wait on. 'drop': they
    go on without it."""


@dataclass(kw_only=True)
class Worker:
    """One life of one rank. Only Membership changes it."""

    rank: int
    incarnation: int
    client: str
    clock: int
    """Last round that it committed."""
    last_seen: float
    state: WorkerState = WorkerState.ABSENT
    links: set[int] = field(default_factory=set)
    """Connections it has to the coordinator, heartbeat included."""
    detached_since: float | None = None
    is_looking: bool = False
    """Whether it may still be looking for the process that leads now, having been with the one before."""
    refusal: MissingContribution | None = None
    """Why this life may not go on, once it is REFUSED."""
    dropped: bool = False
    """Whether it has left without a word."""

    def check(self) -> None:
        """Raises what it is refused with."""
        if self.refusal is not None:
            raise MissingContribution(self.refusal.message, **self.refusal.details)


class Membership:
    """Issues ranks and incarnations, and notices who is gone."""

    def __init__(self, *, num_workers: int, liveness: Liveness, elastic: bool = False) -> None:
        """`elastic`: of so many ranks only those are expected that have joined."""
        self.num_workers = num_workers
        self.elastic = elastic
        self.liveness = liveness
        self.workers: dict[int, Worker] = {}
        self.left: set[int] = set()
        """Ranks whose last life has left, those of a group included that `workers` has forgotten for the next one."""
        self.reserved: frozenset[int] = frozenset()
        """Ranks that no new life may have yet: slots still hold what the present one pushed."""
        self.claimed: frozenset[int] = frozenset()
        """Ranks that those will have who wait for their first round."""
        self.num_changes = 0
        """How often a worker's state has changed in this life of the store."""
        self._last_was_lost = False
        """Whether the last worker to leave did so without a word, before its end."""
        self._awaited: set[int] = set()
        """Ranks of a group that goes on in this life of the store, which have not come back yet; where workers come and
        go, until one of them does."""
        self._incarnations: dict[int, int] = {}
        self._of_client: dict[str, Worker] = {}
        """The latest life of each client that `workers` has one of."""
        self._of_link: dict[int, Worker] = {}
        self._in_state: dict[WorkerState, set[int]] = {state: set() for state in WorkerState}
        """Ranks of `workers`, by their state."""
        self._losses = Earliest()
        """When each LIVE worker will be lost if nothing is heard of it."""
        self._rejoins = Earliest()
        """When each lost worker will be given up, for those that have not been yet."""
        self._changed: set[int] = set()
        """Ranks of which `_losses` has to be told anew: nobody asks as often as workers speak."""
        self._clocks = Earliest()
        """Clocks of the LIVE workers."""

    @property
    def is_done(self) -> bool:
        """Whether there was a group of workers, and all have left."""
        return bool(self.workers) and len(self._in_state[LEFT]) == len(self.workers) and not self._awaited

    @property
    def has_ended(self) -> bool:
        """Whether `is_done`, and the last of the group has left by its own word, or had come to the end."""
        return self.is_done and not self._last_was_lost

    @property
    def gone(self) -> list[int]:
        """Where nobody is there any more of a group that has come to no end: the ranks that were lost."""
        is_gone = self.is_done and not self.has_ended
        return [rank for rank, worker in self.workers.items() if worker.dropped] if is_gone else []

    def join(
        self,
        *,
        client: str,
        conn: int,
        rank: int | None,
        announced: int | None,
        clock: int,
        now: float,
        goes_on: bool = False,
    ) -> Worker:
        """A new life for a rank, or the same one if this client has it already (a resend). `goes_on`: of a group
        that has ended, if this one has; else the next group starts afresh."""
        if announced is not None and announced != self.num_workers and not self.elastic:
            raise BadArgument(
                f"this worker believes in {announced} workers, the store was started for {self.num_workers};"
                " start the store with the same --workers"
            )
        self._check_range(rank)
        if self.is_done and not (goes_on and self.has_ended):
            self._forget_all()
        known = self.find(client)
        if known is not None and known.state is not LEFT:
            if rank not in (None, known.rank):
                raise BadArgument(f"this client is rank {known.rank} already; it can't be rank {rank} as well")
            known.check()
            self.seen(known, now)
            self._attach(known, conn)
            return known
        chosen = self.choose(rank, now)
        incarnation = self._incarnations.get(chosen, 0) + 1
        self._incarnations[chosen] = incarnation
        worker = Worker(rank=chosen, incarnation=incarnation, client=client, clock=clock, last_seen=now)
        self._begin(worker)
        self._attach(worker, conn)
        return worker

    def choose(self, rank: int | None, now: float) -> int:
        """The rank of one who asks for this one, or for any. Raises RankTaken, TooManyWorkers, BadArgument."""
        self._check_range(rank)
        return self._free_rank(now) if rank is None else self._check_rank(rank, now)

    def _check_range(self, rank: int | None) -> None:
        if rank is not None and not 0 <= rank < self.num_workers:
            raise BadArgument(
                f"rank {rank} is not in [0, {self.num_workers}): the store was started for that many workers"
            )

    @property
    def incarnations(self) -> Mapping[int, int]:
        """The last one issued, by rank."""
        return self._incarnations

    def restore(
        self, incarnations: Mapping[int, int], left: Iterable[Worker] = (), *, awaited: Sequence[Worker] = ()
    ) -> None:
        """Lives to come are numbered behind these. `left`: last lives that have left, of a group that goes on;
        `awaited`: those of the other ranks that it had."""
        self._incarnations = dict(incarnations)
        for worker in left:
            self._begin(worker)
            self.leave(worker)
        for worker in awaited if self.elastic else ():
            self._begin(worker)
        self._awaited = {worker.rank for worker in awaited}
        self.num_changes = 0

    def somebody_comes(self, now: float) -> None:
        """A worker asks to join. If it is the first one where a group goes on, and others come and go, those who were
        there have from now on as long to come as anybody may be silent: nobody has waited for them before."""
        if self.elastic and self._awaited:
            self._awaited.clear()
            self.all_went(now)

    def find(self, client: str) -> Worker | None:
        """The worker that this client is, or was until it left; None if it is none, or an older life."""
        return self._of_client.get(client)

    def worker_of(self, client: str) -> Worker:
        """The current worker that this client is. Raises if it is none, or an older life."""
        worker = self._of_client.get(client)
        if worker is None:
            raise StaleIncarnation("this client is no worker here: it never joined, or a newer life took its rank")
        worker.check()  # first: it may be dropped for that
        if worker.state is LEFT:
            why = "was lost, and the others went on without it" if worker.dropped else "has left"
            raise NotAWorker(f"rank {worker.rank} {why}; connect again to train on")
        return worker

    def heartbeat(self, *, client: str, rank: int, incarnation: int, conn: int, now: float) -> None:
        """Word from a worker's native thread. One from an older life is ignored, or from another client."""
        worker = self.workers.get(rank)
        if worker is None or worker.state is LEFT:
            return
        if (worker.client, worker.incarnation) == (client, incarnation):
            self.seen(worker, now)
            self._attach(worker, conn)

    def seen(self, worker: Worker, now: float) -> None:
        """Word from a worker. None from one that was refused: it is lost since then, and not lost anew."""
        if worker.state is WorkerState.REFUSED:
            return
        if now > worker.last_seen:
            worker.last_seen = now
        self._changed.add(worker.rank)
        if worker.state is LOST:
            self._move(worker, WorkerEvent.HEARD)

    def refuse(self, worker: Worker, why: MissingContribution, now: float) -> None:
        """Ends a worker's life, whatever it says from now on: its rank is free for another one."""
        worker.refusal = why
        self._move(worker, WorkerEvent.REFUSED)
        self._rejoins.put(worker.rank, now + self.liveness.rejoin_s)

    def attach(self, *, client: str, conn: int, now: float) -> None:
        """A connection of this client to the coordinator is open (again)."""
        worker = self.find(client)
        if worker is not None and worker.state is not LEFT:
            self.seen(worker, now)
            self._attach(worker, conn)

    @property
    def connections(self) -> list[int]:
        """Numbers of those that workers have, heartbeats' included."""
        return list(self._of_link)

    def detach(self, conn: int, now: float) -> None:
        """A connection is gone."""
        worker = self._of_link.pop(conn, None)
        if worker is None or conn not in worker.links:
            return
        worker.links.discard(conn)
        if not worker.links:
            worker.detached_since = now
            self._changed.add(worker.rank)

    def all_went(self, now: float) -> None:
        """Another process leads from now on. Whoever was with the one before has as long to come here as anybody may be
        silent: one that stands still closes no connection, and its clients take a while to look elsewhere. REQUIRES: no
        worker has a connection."""
        if self.elastic and self._awaited:
            return  # nobody has come yet, and then they have as long
        for rank in self._in_state[LIVE]:
            worker = self.workers[rank]
            worker.last_seen, worker.is_looking = now, True
            self._changed.add(rank)

    def leave(self, worker: Worker) -> None:
        self._move(worker, WorkerEvent.LEAVES)
        worker.links.clear()
        self.left.add(worker.rank)
        self._last_was_lost = False

    def drop(self, worker: Worker, *, had_ended: bool) -> None:
        """A lost one is waited for no longer. `had_ended`: no commit of it would have counted."""
        self.leave(worker)
        worker.dropped, self._last_was_lost = True, not had_ended

    def reached(self, worker: Worker, clock: int) -> None:
        """The worker's round `clock` is decided."""
        worker.clock = clock
        if worker.state is LIVE:
            self._clocks.put(worker.rank, clock)

    def sweep(self, now: float) -> list[Worker]:
        """Makes LOST those whose time is up at `now`, and returns them in rank order."""
        self._note_changes()
        lost = [self.workers[rank] for rank in self._losses.take(now)]
        for worker in lost:
            self._move(worker, WorkerEvent.SILENT)
            self._rejoins.put(worker.rank, now + self.liveness.rejoin_s)
        return lost

    def give_up(self, now: float) -> bool:
        """Whether for some lost worker the time of a next life is up at `now`, and was not before."""
        return bool(self._rejoins.take(now))

    def next_wake(self) -> float | None:
        """When `sweep` or `give_up` may next find somebody."""
        self._note_changes()
        times = (self._losses.smallest(), self._rejoins.smallest())
        return min((time for time in times if time is not None), default=None)

    def expected(self) -> set[int]:
        """Ranks that synchronous rounds wait for: all announced that have not left."""
        return set(self.workers if self.elastic else range(self.num_workers)) - self._in_state[LEFT]

    @property
    def num_expected(self) -> int:
        return (len(self.workers) if self.elastic else self.num_workers) - len(self._in_state[LEFT])

    @property
    def awaited(self) -> Set[int]:
        """Ranks that are waited for since this life of the store began: nobody has come back with them yet."""
        return self._awaited

    @property
    def live(self) -> Set[int]:
        """Ranks whose workers are there; changes with them."""
        return self._in_state[LIVE]

    def present(self) -> list[int]:
        """Ranks whose life goes on, or may."""
        return sorted(self._in_state[LIVE] | self._in_state[LOST])

    def lost(self) -> list[Worker]:
        """LOST and REFUSED workers, in rank order."""
        lost = self._in_state[LOST] | self._in_state[WorkerState.REFUSED]
        return [self.workers[rank] for rank in sorted(lost)]

    def given_up(self) -> list[Worker]:
        """The lost ones whose next lives are not waited for any more, in rank order."""
        return [worker for worker in self.lost() if worker.rank not in self._rejoins]

    def clock(self, rank: int) -> int:
        """The rank's clock; 0 if no worker has joined with it yet."""
        return self.workers[rank].clock if rank in self.workers else 0

    def slowest_clock(self) -> int:
        """Smallest clock among the live."""
        if len(self.workers) < self.num_workers:
            return 0  # of those that have not joined yet
        return int(self._clocks.smallest() or 0)

    def describe(self, rank: int, now: float, *, round: int | None = None) -> str:
        """A worker, for messages: 'rank 1 (in round 7, last seen 0.3 s ago)'. `round`: if it is not the one after its
        clock."""
        worker = self.workers.get(rank)
        if worker is None:
            return f"rank {rank} (has not joined)"
        where = worker.clock + 1 if round is None else round
        return f"rank {rank} (in round {where}, last seen {now - worker.last_seen:.1f} s ago)"

    def describe_all(self, ranks: Iterable[int], now: float, *, round: int | None = None) -> str:
        """Workers, one after the other; '': none."""
        return ", ".join(self.describe(rank, now, round=round) for rank in ranks)

    def _begin(self, worker: Worker) -> None:
        """Puts a new life in place of the rank's last one."""
        before = self.workers.get(worker.rank)
        if before is not None and self.find(before.client) is before:
            del self._of_client[before.client]
        if before is not None:
            before.state = WORKER.after(before.state, WorkerEvent.REPLACED)
        self.workers[worker.rank] = self._of_client[worker.client] = worker
        self.left.discard(worker.rank)
        self._awaited.discard(worker.rank)
        self._move(worker, WorkerEvent.JOINED)

    def _move(self, worker: Worker, event: WorkerEvent) -> None:
        worker.state = WORKER.after(worker.state, event)
        for ranks in self._in_state.values():
            ranks.discard(worker.rank)
        self._in_state[worker.state].add(worker.rank)
        self._rejoins.drop(worker.rank)
        self.num_changes += 1
        self._changed.add(worker.rank)
        if worker.state is LIVE:
            self._clocks.put(worker.rank, worker.clock)
        else:
            self._clocks.drop(worker.rank)

    def _note_changes(self) -> None:
        for rank in self._changed:
            worker = self.workers.get(rank)
            if worker is not None and worker.state is LIVE and worker.last_seen < math.inf:
                self._losses.put(rank, self._lost_at(worker))
            else:
                self._losses.drop(rank)
        self._changed.clear()

    def _forget_all(self) -> None:
        self.workers.clear()
        self._of_client.clear()
        for ranks in self._in_state.values():
            ranks.clear()

    def _attach(self, worker: Worker, conn: int) -> None:
        before = self._of_link.get(conn)
        if before is not None and before is not worker:
            before.links.discard(conn)
        self._of_link[conn] = worker
        worker.links.add(conn)
        worker.detached_since, worker.is_looking = None, False
        self._changed.add(worker.rank)

    def _lost_at(self, worker: Worker) -> float:
        silent = worker.last_seen + self.liveness.silence_s
        if worker.detached_since is None or worker.is_looking:
            return silent
        return min(silent, worker.detached_since + self.liveness.detached_s)

    def _takeable(self, rank: int) -> bool:
        if rank in self.reserved or rank in self.claimed:
            return False
        worker = self.workers.get(rank)
        return worker is None or worker.state is not LIVE or worker.detached_since is not None

    def _free_rank(self, now: float) -> int:
        """A rank that nobody ever had before one whose worker is gone; but where others come and go, first one that
        they wait for."""
        ranks = range(self.num_workers)
        lost = sorted(self._in_state[LOST]) if self.elastic else ()
        for rank in chain(lost, (r for r in ranks if r not in self.workers), (r for r in ranks if r in self.workers)):
            if self._takeable(rank):
                return rank
        raise TooManyWorkers(
            f"all {self.num_workers} ranks are taken by live workers; start the store with more --workers,"
            " or connect with role='client' to read and write without training",
            last_seen_s=max((now - worker.last_seen for worker in self.workers.values()), default=0.0),
        )

    def _check_rank(self, rank: int, now: float) -> int:
        if rank in self.claimed:
            raise RankTaken(f"rank {rank} is that of a worker which waits for its first round", rank=rank)
        if self._takeable(rank):
            return rank
        held = self.workers[rank]
        last_seen_s = now - held.last_seen
        if rank in self.reserved:
            why = "has finished a round that others have not; join again when they have"
        else:
            why = (
                f"is held by client {held.client[:8]}, last seen {last_seen_s:.1f} s ago;"
                " give each worker its own rank (RANK, or connect(rank=...))"
            )
        raise RankTaken(f"rank {rank} {why}", rank=rank, last_seen_s=last_seen_s)
