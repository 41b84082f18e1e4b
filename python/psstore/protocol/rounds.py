"""Turns commits into decisions. Quorum and staleness exist here and nowhere else. Part of the coordinator."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from psstore.errors import BadArgument, DeadlineExceeded, PsstoreError, RoundOutOfOrder, WorkerLost
from psstore.protocol.hypers import Chosen, Hypers
from psstore.protocol.membership import Membership, Worker
from psstore.protocol.signing import Signer
from psstore.types import UNBOUNDED, Consistency
from psstore.wire.messages import Commit, Committed, DecisionFact, Member, Signed
from psstore.wire.ranges import well_formed

MIN_WEIGHT, MAX_WEIGHT = 1e-18, 1e18
"""Of one contribution: shards multiply in float32, and a sum of many must be a finite divisor there."""


@dataclass(frozen=True)
class Waiting:
    """A commit whose reply is owed."""

    commit: Commit
    conn: int
    request: int
    since: float
    """When the wait began."""
    hypers: Mapping[int, Chosen] = field(default_factory=dict)
    """What it names, completed and checked."""

    @property
    def until(self) -> float:
        return self.since + self.commit.wait_s


@dataclass(frozen=True)
class Closed:
    """The last round of a worker that was decided, so that a resent commit gets the same answer."""

    incarnation: int
    round: int
    decision: int
    late: bool


@dataclass(frozen=True)
class Answer:
    """What is owed to a commit now."""

    conn: int
    request: int
    result: Committed | PsstoreError


class Rounds:
    """The decision log and everything that waits for it."""

    def __init__(
        self,
        *,
        consistency: Consistency,
        membership: Membership,
        signer: Signer,
        rule_of_group: Callable[[], Mapping[int, str]],
    ) -> None:
        self.consistency = consistency
        self.decided = 0
        """Number of the last decision."""
        self.max_staleness = 0
        """Largest lead over the slowest live worker with which a worker was let go."""
        self._membership = membership
        self._signer = signer
        self._log: deque[tuple[int, Signed]] = deque()
        self._staged: dict[int, Waiting] = {}
        """By rank: commits that no decision holds yet."""
        self._owed: dict[int, Waiting] = {}
        """By rank: decided commits whose reply waits for slower workers."""
        self._closed: dict[int, Closed] = {}
        self._hypers = Hypers(rule_of_group)

    # ---- what the log holds ----

    def since(self, number: int) -> tuple[Signed, ...]:
        """Every kept decision after `number`, in order."""
        return tuple(signed for n, signed in self._log if n > number)

    def forget(self, floor: int) -> None:
        """Every shard has applied decision `floor`: nobody needs it carried any more."""
        while self._log and self._log[0][0] <= floor:
            self._log.popleft()

    @property
    def log_length(self) -> int:
        return len(self._log)

    def first_clock(self) -> int:
        """The clock that a worker joins with: the open round in lockstep, the slowest live worker's else."""
        return self.decided if self.consistency.lockstep else self._membership.slowest_clock()

    # ---- events ----

    def commit(self, worker: Worker, waiting: Waiting) -> list[Answer]:
        """A worker ends a round. Raises before anything changes; else returns all that became answerable."""
        commit = waiting.commit
        closed = self._closed.get(worker.rank)
        if closed is not None and (closed.incarnation, closed.round) == (worker.incarnation, commit.round):
            self._owed[worker.rank] = waiting  # asked again
            return self._release()
        if commit.round != worker.clock + 1:
            raise RoundOutOfOrder(
                f"rank {worker.rank} commits round {commit.round}, but it is in round {worker.clock + 1}",
                rank=worker.rank,
            )
        lockstep = self.consistency.lockstep
        if lockstep and commit.round <= self.decided:
            return self._late(worker, waiting)
        self._check(commit)
        self._staged[worker.rank] = replace(waiting, hypers=self._hypers.complete(commit.hypers))
        self.forget(min(commit.floor, self.decided))
        if not lockstep:
            self._decide()
            return self.settle()
        return self.settle() + self._complain(waiting.since)

    def settle(self) -> list[Answer]:
        """Decides what can be decided and answers what waited for it: after a commit, a leave or a loss."""
        while self.consistency.lockstep and self._staged and len(self._staged) >= self._needed():
            self._decide()
        return self._release()

    def lost(self, now: float) -> list[Answer]:
        """Workers were lost: who can't go on without them hears so."""
        return self.settle() + self._complain(now)

    def expire(self, now: float) -> list[Answer]:
        """Ends the waits whose time is up. The commits stay: only the waiting is over."""
        answers = []
        for waits in (self._staged, self._owed):
            for rank, waiting in waits.items():
                if waiting.until <= now:
                    answers.append(Answer(waiting.conn, waiting.request, self._too_late(rank, waiting, now)))
                    waits[rank] = replace(waiting, since=float("inf"))
        return answers

    def next_wake(self) -> float | None:
        """When `expire` may next find something."""
        waits = (*self._staged.values(), *self._owed.values())
        return min((waiting.until for waiting in waits if waiting.until < float("inf")), default=None)

    def replaced(self, rank: int) -> None:
        """A rank starts a new life: nothing is owed to the old one. A staged commit of the old life is void,
        since the new life will do that round again."""
        self._staged.pop(rank, None)
        self._owed.pop(rank, None)
        self._closed.pop(rank, None)

    def leave(self, worker: Worker) -> list[Answer]:
        self._staged.pop(worker.rank, None)
        self._owed.pop(worker.rank, None)
        return self.settle()

    # ---- how ----

    @staticmethod
    def _check(commit: Commit) -> None:
        if not well_formed(commit.present):
            raise BadArgument("commit.present must be ascending, disjoint ranges (first, last) that don't touch")
        if not MIN_WEIGHT <= commit.weight <= MAX_WEIGHT:
            raise BadArgument(f"commit weight is {commit.weight}; it must be from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")

    def _needed(self) -> int:
        expected = len(self._membership.expected())
        if self.consistency.quorum == self.consistency.num_workers:
            return max(1, expected)
        return max(1, min(self.consistency.quorum, expected))

    def _decide(self) -> None:
        """The staged commits become the next decision. Members are in rank order: that is the order of reduction."""
        ranks = sorted(self._staged)
        commits = [self._staged[rank].commit for rank in ranks]
        first = commits[0]
        hypers = self._hypers.decide(self._staged[ranks[0]].hypers)
        number = self.decided + 1
        workers = [self._membership.workers[rank] for rank in ranks]
        fact = DecisionFact(
            number=number,
            members=tuple(
                Member(
                    rank=worker.rank,
                    incarnation=worker.incarnation,
                    round=commit.round,
                    weight=commit.weight,
                    present=commit.present,
                )
                for worker, commit in zip(workers, commits, strict=True)
            ),
            divisor=sum(commit.weight for commit in commits) if first.average else 1.0,
            skip=any(commit.non_finite for commit in commits),
            hypers=hypers,
        )
        self._log.append((number, self._signer.sign(fact)))
        self.decided = number
        for worker, commit in zip(workers, commits, strict=True):
            worker.clock = commit.round
            self._closed[worker.rank] = Closed(worker.incarnation, commit.round, number, late=False)
            self._owed[worker.rank] = self._staged.pop(worker.rank)

    def _late(self, worker: Worker, waiting: Waiting) -> list[Answer]:
        """The round was decided without this worker: it goes on with the open one."""
        round = waiting.commit.round
        worker.clock = self.decided
        self._closed[worker.rank] = Closed(worker.incarnation, round, decision=round, late=True)
        self._owed[worker.rank] = waiting
        return self._release()

    def _release(self) -> list[Answer]:
        """Answers every decided commit that staleness lets go."""
        slowest = self._membership.slowest_clock()
        bound = self.consistency.staleness
        answers = []
        for rank in sorted(self._owed):
            worker = self._membership.workers[rank]
            lead = worker.clock - slowest
            if not self.consistency.lockstep and bound != UNBOUNDED and lead > bound:
                continue
            self.max_staleness = max(self.max_staleness, lead)
            answers.append(self._answer(worker, self._owed.pop(rank), slowest))
        return answers

    def _answer(self, worker: Worker, waiting: Waiting, slowest: int) -> Answer:
        closed = self._closed[worker.rank]
        committed = Committed(
            round=closed.round,
            decision=closed.decision,
            late=closed.late,
            next_round=worker.clock + 1,
            decisions=self.since(waiting.commit.since),
            last=self.decided,
            slowest=slowest,
        )
        return Answer(waiting.conn, waiting.request, committed)

    def _complain(self, now: float) -> list[Answer]:
        """In lockstep, tells those who wait if the round can't close for want of lost workers. Their commits
        stay: if the lost one's next life joins and commits, the round closes with them."""
        lost = [w for w in self._membership.lost() if w.rank not in self._staged]
        able = self._membership.expected() - {w.rank for w in lost}
        if not lost or not self.consistency.lockstep or len(able | set(self._staged)) >= self._needed():
            return []
        missing = lost[0]
        round = self.decided + 1
        error = WorkerLost(
            f"round {round} needs rank {missing.rank}, which is lost: last seen {now - missing.last_seen:.1f} s ago,"
            f" its last round was {missing.clock}",
            rank=missing.rank,
            round=round,
            last_seen_s=now - missing.last_seen,
        )
        return [Answer(w.conn, w.request, error) for w in self._staged.values()]

    def _too_late(self, rank: int, waiting: Waiting, now: float) -> DeadlineExceeded:
        """Names who was waited for: in lockstep those without a commit, else the slowest."""
        if self.consistency.lockstep:
            missing = sorted(self._membership.expected() - set(self._staged))
        else:
            slowest = self._membership.slowest_clock()
            missing = [r for r in sorted(self._membership.expected()) if self._membership.clock(r) == slowest]
        who = ", ".join(self._membership.describe(r, now) for r in missing) or "nobody"
        return DeadlineExceeded(
            f"rank {rank} waited {waiting.commit.wait_s:g} s at the end of round {waiting.commit.round} for {who}",
            round=waiting.commit.round,
            waited_s=waiting.commit.wait_s,
            rank=missing[0] if missing else rank,
        )
