"""Turns commits into decisions. Quorum and staleness exist here and nowhere else. Part of the coordinator."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from msgspec import Struct
from msgspec.structs import replace

from psstore.errors import BadArgument, DeadlineExceeded, PsstoreError, RoundOutOfOrder, TornRound, WorkerLost
from psstore.protocol import decisions
from psstore.protocol.decision_log import DecisionLog
from psstore.protocol.grace import Grace
from psstore.protocol.hand_ins import HandIns
from psstore.protocol.hypers import Chosen, Hypers
from psstore.protocol.losses import Losses
from psstore.protocol.membership import Membership, Worker
from psstore.protocol.norm_guard import NormGuard
from psstore.protocol.promised_pushes import Finishing, PromisedPushes
from psstore.protocol.replies import Reply
from psstore.protocol.roster import Roster
from psstore.protocol.schema_registry import Group
from psstore.protocol.signing import Signer
from psstore.protocol.stops import Stops
from psstore.protocol.waits import Waits
from psstore.types import ADAPTIVE, UNBOUNDED, Consistency
from psstore.wire.messages import Commit, Committed, Refusal

ATTEST_EVERY = 64
"""Decisions after which one of the workers asks every shard what it has applied: about twice as many are kept. Each is
a few hundred bytes, and goes to whoever joins."""


class Waiting(Struct, frozen=True, gc=False):
    """A commit whose reply is owed."""

    commit: Commit
    conn: int
    request: int
    since: float
    """When the wait began."""
    hypers: Mapping[int, Chosen] = MappingProxyType({})
    """What it names, completed and checked."""
    norm: float | None = None
    """The norm of its contribution, where these are held against each other."""

    @property
    def until(self) -> float:
        return self.since + self.commit.wait_s

    def reply(self, result: Committed | PsstoreError) -> Reply:
        return Reply(self.conn, self.request, result)


class Closed(Struct, frozen=True, gc=False):
    """The last round of a worker that was decided, so that a resent commit gets the same answer."""

    incarnation: int
    round: int
    decision: int
    late: bool = False
    skip: bool = False
    empty: bool = False
    refused: Refusal | None = None


class Rounds:
    """What is staged, decided, and owed to workers. The decisions themselves are in `log`."""

    def __init__(
        self,
        *,
        consistency: Consistency,
        membership: Membership,
        signer: Signer,
        num_shards: int,
        groups: Callable[[], Mapping[int, Group]],
        hand_ins: HandIns,
        roster: Roster,
    ) -> None:
        self.consistency = consistency
        self.log = DecisionLog(signer=signer, num_shards=num_shards)
        self.max_staleness = 0
        """Largest lead over the slowest live worker with which a worker was let go."""
        self.torn: TornRound | None = None
        """Why there will be no other decision."""
        self._num_ahead = [0] * 65
        """Commits that were answered, by the bits of the rounds that their worker was ahead of the slowest."""
        self._waits_s: dict[int, float] = {}
        """Rank -> how long its commits that nobody waits for any more have waited, all together, in seconds."""
        self._at = 0.0
        """When something came last after which a round may be decided."""
        self._membership = membership
        self._lockstep = consistency.lockstep
        self._needs_attesting = num_shards > 1
        self._attester = -1
        """The rank that is to ask the shards what they have applied."""
        self._staged: Waits[Waiting] = Waits()
        """Commits that no decision holds yet."""
        self._grace = Grace() if consistency.grace_s == ADAPTIVE else None
        """How long the open round waits for who is missing; None: for the same time in each round."""
        self._quorum_at: float | None = None
        """Since when the staged commits are a quorum; None: they are none."""
        self._particular: dict[int, Commit] = {}
        """Rank -> its staged commit, if that is early or clips. These commits agree, so that one speaks for all."""
        self._owed: Waits[Waiting] = Waits()
        """Decided commits whose reply waits for slower workers."""
        self._just_decided: dict[int, Waiting] = {}
        """Rank -> its decided commit that `_release` has not looked at yet."""
        self._released_at: tuple[int, bool, tuple[int, int]] | None = None
        """The state by which `_release` last let waits go: while it stays, the others stay, too."""
        self.closed: dict[int, Closed] = {}
        """Rank -> its last round that was decided."""
        self._promised = PromisedPushes(membership)
        self._losses = Losses()
        """The losses that were told to ranks which wait for the end of their round."""
        self.hypers = Hypers(groups)
        self.hand_ins = hand_ins
        self.roster = roster
        self._stops = Stops()
        self.norm_guard = NormGuard(consistency.refuse_norm, signer=signer, num_shards=num_shards)

    def first_clock(self) -> int:
        """The clock that a worker joins with: the open round in lockstep, the slowest live worker's else."""
        return self.log.last if self._lockstep else self._membership.slowest_clock()

    @property
    def num_waiting(self) -> int:
        """Commits whose answer is owed."""
        return len(self._staged.of) + len(self._owed.of)

    def waited_s(self, rank: int, now: float) -> float:
        """How long the rank's commits, and the ends of its early ones, have waited for other workers, all together, in
        seconds. The rank that the others wait for is the one with the least."""
        under_way = (waits.of.get(rank) for waits in (self._staged, self._owed))
        since = [waiting.since for waiting in under_way if waiting is not None]
        return (
            self._waits_s.get(rank, 0.0)
            + sum(max(0.0, now - one) for one in since)
            + self._promised.waited_s(rank, now)
        )

    def waited_for(self, now: float) -> str:
        """Which workers those wait for who have ended a round, described; '': nobody waits."""
        if self._staged.of:
            return self._described(self._missing(), now)
        if self._promised.num_waiting or (self._promised.pending and self._owed.of):
            return self._described(self._promised.owing, now)
        return self._described(self._missing(), now) if self._owed.of else ""

    def staleness(self) -> dict[int, int]:
        """Rounds by which a worker was ahead of the slowest -> commits that were answered so: 2 and 3 together at 2,
        4 to 7 at 4, and so on."""
        return {1 << bits >> 1: count for bits, count in enumerate(self._num_ahead) if count}

    @property
    def is_done(self) -> bool:
        """Whether all that the last decision counts on is there."""
        return not self._promised.pending

    @property
    def awaited(self) -> list[int]:
        """Ranks whose commits the open round waits for, in lockstep."""
        return sorted(self._membership.expected() - set(self._staged.of))

    # ---- events ----

    def refuse_if_torn(self) -> None:
        """Raises TornRound once a round is: what comes after it would stand on half a step."""
        if self.torn is not None:
            raise TornRound(self.torn.message, **self.torn.details)

    def commit(self, worker: Worker, waiting: Waiting) -> list[Reply]:
        """A worker ends a round. Raises before anything changes; else returns all that became answerable."""
        commit, self._at = waiting.commit, waiting.since
        if self._has_closed(worker, commit.round):
            self._just_decided[worker.rank] = waiting  # asked again
            return ([] if commit.early else self._promised.finished(worker.rank, self._at)) + self._release()
        self._check_round(worker, commit)
        decisions.check(commit, self.consistency)
        if self._stops.is_over(worker.rank, self.log.last):
            return [self._stopped(worker, waiting)]
        lockstep = self._lockstep
        if lockstep and commit.round <= self.log.last:
            return self._late(worker, waiting)
        if self._particular:
            self._check_agreement(worker.rank, commit)
        hypers, norm = self.hypers.complete(commit.hypers), self.norm_guard.measured(worker, commit)
        self._stage(worker.rank, Waiting(commit, waiting.conn, waiting.request, waiting.since, hypers, norm))
        if not lockstep:
            self._decide()
            return self.settle(waiting.since)
        return self.settle(waiting.since) + (self.complain(waiting.since) if self._staged.of else [])

    def finish(self, worker: Worker, finishing: Finishing) -> list[Reply]:
        """A worker says that all is staged which its early commit promised."""
        round = finishing.finish.round
        if not self._has_closed(worker, round):
            raise RoundOutOfOrder(
                f"rank {worker.rank} finishes round {round}, but that is not the last round of its that was decided",
                rank=worker.rank,
            )
        return self._promised.wait(worker, finishing) + self._release()

    def settle(self, now: float) -> list[Reply]:
        """Decides what can be decided and answers what waited for it: after a commit, a leave or a loss, and when a
        quorum's grace is over."""
        self._at = now
        if self._lockstep and self._is_complete():
            self._decide()
        return self._release()

    def limit(self, rank: int, version: int, now: float) -> list[Reply]:
        """Commits of this rank count up to that decision, or the last one if it is later."""
        self._stops.limit(rank, version)
        return self._stop(now)

    def end(self, version: int, now: float) -> list[Reply]:
        """Nobody's commits count beyond that decision, of those who are here and of those who come for others."""
        self._stops.end(self._membership.present(), version)
        return self._stop(now)

    def is_over(self, rank: int) -> bool:
        """Whether no commit of this rank counts any more."""
        return self._stops.is_over(rank, self.log.last)

    def _stop(self, now: float) -> list[Reply]:
        """Who has ended the open round already is told that it won't be decided, and nobody waits for slower workers
        any more."""
        over = [rank for rank in self._staged.of if self._stops.is_over(rank, self.log.last)]
        told = [self._stopped(self._membership.workers[rank], self._staged.of[rank]) for rank in over]
        for rank in over:
            self._unstage(rank)
        return told + self.settle(now)

    def lost(self, workers: Sequence[Worker], now: float) -> list[Reply]:
        """Workers were lost: what they have promised is void."""
        replies: list[Reply] = []
        for worker in workers:
            replies += self._tear(worker.rank, "was lost") + self._void_promise(worker, now)
        return replies + self.settle(now)

    def refused(self, worker: Worker, why: PsstoreError, now: float) -> list[Reply]:
        """A worker was refused. What it has committed and is not decided does not count."""
        waits = (self._staged.of.get(worker.rank), self._owed.pop(worker.rank))
        self._unstage(worker.rank)
        return [waiting.reply(why) for waiting in waits if waiting is not None] + self.lost([worker], now)

    def expire(self, now: float) -> list[Reply]:
        """Ends the waits whose time is up: a quorum's for others, which makes a decision, and those of workers, whose
        commits stay."""
        replies = self._promised.expire(now)
        if self._is_grace_over(now):
            replies += self.settle(now)
        for waits in (self._staged, self._owed):
            for rank, waiting in waits.due(now):
                replies.append(waiting.reply(self._too_late(rank, waiting, now)))
                self._count_wait(rank, waiting, now)
                waits.put(rank, replace(waiting, since=math.inf))
        return replies

    def next_wake(self) -> float | None:
        """When `expire` may next find something."""
        times = (self._staged.next_wake(), self._owed.next_wake(), self._promised.next_wake(), self._grace_ends())
        return min((time for time in times if time is not None), default=None)

    def replaced(self, rank: int) -> list[Reply]:
        """A rank starts a new life: nothing is owed to the old one. A staged commit of the old life is void,
        since the new life will do that round again."""
        self._unstage(rank)
        self._owed.pop(rank)
        self.closed.pop(rank, None)
        if self._grace is not None:
            self._grace.forget(rank)
        self._promised.forget(rank)
        self._losses.forget(rank)
        self._stops.replace(rank, self._membership.workers)
        return self._tear(rank, "was replaced by a new life")

    def leave(self, worker: Worker, now: float) -> list[Reply]:
        """Nobody waits for this one any more."""
        self._losses.forget(worker.rank)
        self._unstage(worker.rank)
        self._owed.pop(worker.rank)
        if self._grace is not None:
            self._grace.forget(worker.rank)
        self._promised.forget(worker.rank)
        return self._tear(worker.rank, "was dropped" if worker.dropped else "left") + self.settle(now)

    # ---- how ----

    def _has_closed(self, worker: Worker, round: int) -> bool:
        """True if `round` is the last decided round of this life of the worker."""
        closed = self.closed.get(worker.rank)
        return closed is not None and closed.round == round and closed.incarnation == worker.incarnation

    def _check_round(self, worker: Worker, commit: Commit) -> None:
        if self._promised.owes(worker.rank):
            raise RoundOutOfOrder(
                f"rank {worker.rank} commits round {commit.round}, but has not finished round {worker.clock}, which it"
                " committed early",
                rank=worker.rank,
            )
        if commit.round != worker.clock + 1:
            raise RoundOutOfOrder(
                f"rank {worker.rank} commits round {commit.round}, but it is in round {worker.clock + 1}",
                rank=worker.rank,
            )

    def _check_agreement(self, rank: int, commit: Commit) -> None:
        """Early and clipped don't go together in one round either."""
        other = next((other for other in self._particular if other != rank), None)
        if other is None:
            return
        both = (commit, self._particular[other])
        if any(c.early for c in both) and any(c.max_norm is not None for c in both):
            raise BadArgument(
                f"round {commit.round}: one of ranks {rank} and {other} commits early, the other with max_norm;"
                " no decision can be both, let all workers do the same"
            )

    def _stage(self, rank: int, waiting: Waiting) -> None:
        if self._grace is not None and rank not in self._staged.of:
            self._grace.came(rank, self._at, brings=bool(waiting.commit.present))
        self._staged.put(rank, waiting)
        if waiting.commit.early or waiting.commit.max_norm is not None:
            self._particular[rank] = waiting.commit
        else:
            self._particular.pop(rank, None)

    def _unstage(self, rank: int) -> None:
        self._staged.pop(rank)
        self._particular.pop(rank, None)
        if not self._has_quorum():
            self._quorum_at = None

    def _is_complete(self) -> bool:
        """Whether the open round can be decided: it has its quorum, and whoever else is there has committed, too, or
        had the time to."""
        if not self._has_quorum():
            self._quorum_at = None
            return False
        if self._quorum_at is None:
            self._quorum_at = self._at
        return self._has_everybody() or self._is_grace_over(self._at)

    def _has_quorum(self) -> bool:
        return 0 < len(self._staged.of) >= self._needed() and self.roster.has_enough

    def _has_everybody(self) -> bool:
        """Whether all who are there have committed: nobody waits for those who have not joined, or are lost."""
        return self._staged.of.keys() >= self._membership.live

    def _grace_ends(self) -> float | None:
        if self._quorum_at is None:
            return None
        if self._grace is None:
            return self._quorum_at + self.consistency.grace_s
        there = self._staged.of
        return self._grace.ends(num_there=len(there), missing=self._membership.live - there.keys())

    def _is_grace_over(self, now: float) -> bool:
        ends = self._grace_ends()
        return ends is not None and now >= ends

    def _needed(self) -> int:
        expected = self._membership.num_expected
        if self.consistency.quorum == self.consistency.num_workers:
            return max(1, expected)
        return max(1, min(self.consistency.quorum, expected))

    def _decide(self) -> None:
        """The staged commits become the next decision. Members are in rank order: that is the order of reduction.
        Whose contribution is refused is no member, and where all are, nothing changes."""
        staged = sorted(self._staged.of.items())
        refused = {} if self.norm_guard.ratio is None else self._refused(staged)
        counted = [one for one in staged if one[0] not in refused] if refused else staged
        members = counted or staged
        workers, commits = [], []
        for rank, waiting in members:
            workers.append(self._membership.workers[rank])
            commits.append(waiting.commit)
        number = self.log.last + 1
        hypers = self.hypers.decide(members[0][1].hypers)
        fact = decisions.make(number, workers, commits, hypers, skip=not counted)
        self.log.append(fact)
        if self.norm_guard.ratio is not None and not fact.skip:
            self.norm_guard.admit((waiting.commit.present, waiting.norm) for _, waiting in counted)
        empty = fact.skip and bool(counted) and not any(commit.non_finite for commit in commits)
        for rank, waiting in staged:
            worker, round = self._membership.workers[rank], waiting.commit.round
            self._membership.reached(worker, round)
            self.closed[rank] = Closed(
                worker.incarnation, round, number, skip=fact.skip, empty=empty, refused=refused.get(rank)
            )
            self._losses.forget(rank)
        self._just_decided.update(staged)
        if self._grace is not None:
            self._grace.decided(self._at)
        self._staged.clear()
        self._particular.clear()
        self._quorum_at = None
        if number % ATTEST_EVERY == 0 and self._needs_attesting:
            self._attester = staged[number // ATTEST_EVERY % len(staged)][0]
        if fact.early:
            promising = [rank for rank, waiting in staged if waiting.commit.early]
            self._promised.begin(commits[0].round, members=dict(staged), owing=promising)
        if self.roster.is_elastic:
            self.roster.decided(number, dict(staged))
        self.hand_ins.decided()

    def _refused(self, staged: Sequence[tuple[int, Waiting]]) -> dict[int, Refusal]:
        """Why contributions of the round do not count, by rank."""
        judged = {rank: self.norm_guard.judge(rank, waiting.commit.present, waiting.norm) for rank, waiting in staged}
        refused = {rank: refusal for rank, refusal in judged.items() if refusal is not None}
        self.norm_guard.refused(refused.values())
        return refused

    def _late(self, worker: Worker, waiting: Waiting) -> list[Reply]:
        """The round was decided without this worker: it goes on with the open one."""
        round = waiting.commit.round
        if self._grace is not None:
            self._grace.came(worker.rank, self._at, brings=bool(waiting.commit.present), late=True)
        self._membership.reached(worker, self.log.last)
        self.closed[worker.rank] = Closed(worker.incarnation, round, decision=round, late=True)
        self._just_decided[worker.rank] = waiting
        return self._release()

    def _release(self) -> list[Reply]:
        """Answers every decided commit that staleness lets go. One that was not early and is in a decision that is
        waits until the round is done: what its worker pushes next would come in place of what slots still need."""
        slowest = self._membership.slowest_clock()
        answers = []
        for rank, waiting in sorted(self._take_candidates(slowest).items()):
            worker = self._membership.workers[rank]
            if self._may_go(worker, waiting, slowest):
                ahead = worker.clock - slowest
                if ahead > self.max_staleness:
                    self.max_staleness = ahead
                self._num_ahead[ahead.bit_length() if ahead > 0 else 0] += 1
                if rank in self._owed.of:
                    self._owed.pop(rank)
                if waiting.since < self._at:
                    self._count_wait(rank, waiting, self._at)
                if self._grace is not None:
                    self._grace.answered(rank, self._at, brings=bool(waiting.commit.present))
                answers.append(self._answer(worker, waiting, slowest))
            else:
                self._owed.put(rank, waiting)
        return answers

    def _take_candidates(self, slowest: int) -> dict[int, Waiting]:
        """The waits, by rank, that may be answered: those of workers that were just decided, and all others only if
        something has changed for them since the last call."""
        candidates, self._just_decided = self._just_decided, {}
        waited_for = (slowest, self._promised.pending, self._stops.at(self.log.last))
        if waited_for == self._released_at:
            return candidates
        self._released_at = waited_for
        return {**self._owed.of, **candidates}

    def _may_go(self, worker: Worker, waiting: Waiting, slowest: int) -> bool:
        if self._promised.pending and not waiting.commit.early:
            return False
        if self._stops.is_over(worker.rank, self.log.last):
            return True
        bound = self.consistency.staleness
        return self._lockstep or bound == UNBOUNDED or worker.clock - slowest <= bound

    def _count_wait(self, rank: int, waiting: Waiting, now: float) -> None:
        """Takes note of a wait that is over."""
        self._waits_s[rank] = self._waits_s.get(rank, 0.0) + max(0.0, now - waiting.since)

    def _answer(self, worker: Worker, waiting: Waiting, slowest: int) -> Reply:
        closed = self.closed[worker.rank]
        committed = Committed(
            round=closed.round,
            decision=closed.decision,
            late=closed.late,
            next_round=worker.clock + 1,
            decisions=self.log.since(waiting.commit.since),
            last=self.log.last,
            slowest=slowest,
            skip=closed.skip,
            empty=closed.empty,
            refused=closed.refused,
            attest=worker.rank == self._attester,
            hand_in=self.hand_ins.is_wanted(worker),
            stop=self._stops.is_over(worker.rank, self.log.last),
            members=self.roster.since(waiting.commit.members) if self.roster.is_elastic else (),
        )
        self._attester = -1 if committed.attest else self._attester
        return waiting.reply(committed)

    def _stopped(self, worker: Worker, waiting: Waiting) -> Reply:
        """Nothing has changed: the round is open still, and this commit of it does not count."""
        committed = Committed(
            round=waiting.commit.round,
            decision=self.log.last,
            late=True,
            next_round=worker.clock + 1,
            decisions=self.log.since(waiting.commit.since),
            last=self.log.last,
            stop=True,
        )
        return waiting.reply(committed)

    def complain(self, now: float) -> list[Reply]:
        """Tells those who wait of the workers that were given up and for want of whom the round can't close, each once.
        Their commits stay: if the lost one's next life joins and commits, the round closes with them."""
        lost = self._needed_of(self._membership.given_up()) if self._staged.of else []
        if not lost:
            return []
        replies = []
        for rank, waiting in list(self._staged.of.items()):
            if waiting.since < math.inf and self._losses.is_news(rank, waiting.request, lost):
                self._losses.tell(rank, waiting.request, lost)
                replies.append(waiting.reply(self._worker_lost(f"round {self.log.last + 1}", lost[0], now)))
                self._count_wait(rank, waiting, now)
                self._staged.put(rank, replace(waiting, since=math.inf))
        return replies

    def _needed_of(self, gone: Sequence[Worker]) -> list[Worker]:
        """Who of `gone` keeps the open round from closing; empty unless in lockstep."""
        lost = [w for w in gone if w.rank not in self._staged.of]
        if not lost or not self._lockstep:
            return []
        able = self._membership.expected() - {w.rank for w in lost}
        return lost if len(able | set(self._staged.of)) < self._needed() else []

    def _worker_lost(self, who: str, missing: Worker, now: float, **waited: float) -> WorkerLost:
        return WorkerLost(
            f"{who} needs rank {missing.rank}, which is lost: last seen {now - missing.last_seen:.1f} s ago,"
            f" its last round was {missing.clock}",
            rank=missing.rank,
            round=self.log.last + 1,
            last_seen_s=now - missing.last_seen,
            **waited,
        )

    def _void_promise(self, worker: Worker, now: float) -> list[Reply]:
        """Drops a lost worker's early commit that is not decided: nobody may count on the pushes that it promised.
        Should the worker be there after all, it commits again."""
        waiting = self._staged.of.get(worker.rank)
        if waiting is None or not waiting.commit.early:
            return []
        self._unstage(worker.rank)
        error = WorkerLost(
            f"rank {worker.rank} was taken for lost, last seen {now - worker.last_seen:.1f} s ago, and its early commit"
            f" of round {waiting.commit.round} is void; commit again",
            rank=worker.rank,
            round=waiting.commit.round,
            last_seen_s=now - worker.last_seen,
        )
        return [waiting.reply(error)]

    def _tear(self, rank: int, why: str) -> list[Reply]:
        """`rank` is gone. If it owed pushes, nobody waits for anything any more."""
        if not self._promised.owes(rank):
            return []
        self.torn = self._promised.tear(rank, why)
        waits = [*self._staged.of.values(), *self._owed.of.values()]
        self._staged.clear()
        self._particular.clear()
        self._quorum_at = None
        self._owed.clear()
        return self._promised.fail(self.torn) + [waiting.reply(self.torn) for waiting in waits]

    def _too_late(self, rank: int, waiting: Waiting, now: float) -> DeadlineExceeded | WorkerLost:
        """Names who was waited for: who is lost; else who has not finished, in lockstep who has no commit, or the
        slowest."""
        lost = self._needed_of(self._membership.lost()) if rank in self._staged.of else []
        if lost:
            waited_s = waiting.commit.wait_s
            who = f"rank {rank} waited {waited_s:g} s for a replacement: round {waiting.commit.round}"
            return self._worker_lost(who, lost[0], now, waited_s=waited_s)
        missing = self._promised.owing if self._promised.pending and rank in self._owed.of else self._missing()
        return DeadlineExceeded(
            f"rank {rank} waited {waiting.commit.wait_s:g} s at the end of round {waiting.commit.round} for"
            f" {self._described(missing, now)}",
            round=waiting.commit.round,
            waited_s=waiting.commit.wait_s,
            rank=missing[0] if missing else rank,
        )

    def _missing(self) -> list[int]:
        """Ranks whose commits are waited for: in lockstep those who have none, else the slowest."""
        if self._lockstep:
            return self.awaited
        slowest = self._membership.slowest_clock()
        return [rank for rank in sorted(self._membership.expected()) if self._membership.clock(rank) == slowest]

    def _described(self, missing: Sequence[int], now: float) -> str:
        if not missing and self.roster.num_missing:
            return f"{self.roster.num_missing} more workers to come"
        return self._membership.describe_all(missing, now) or "nobody"
