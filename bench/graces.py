"""What share of its learners' time a store with a quorum keeps, by the grace that it gives to those who are late.

    python -m bench.graces [--quick] [--json FILE]

Learners of DiLoCo are played to a coordinator, which is called in this process, under a clock that jumps: nothing is
measured that a machine could disturb, and the same seed gives the same figures. A learner works on a contribution,
commits it to the round that is open by then, and goes on when it is answered. Axes: grace, in parts of the time that a
contribution takes a usual learner, and who is slow or flaky. Counted is the time that learners spend on contributions,
as a share of all time: the rest they wait. One that is stalled does not work, and nothing is lost for it.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from bench.command import Subject, run
from bench.machine import machine
from bench.report import Report, Table
from psstore.protocol.coordinator import Coordinator
from psstore.protocol.membership import Liveness
from psstore.protocol.replies import Reply
from psstore.protocol.signing import Signer
from psstore.types import ADAPTIVE, Consistency
from psstore.wire.messages import Commit, Committed, Join

USUAL_S = 1.0
"""What a contribution takes."""

JITTER = 0.05
"""How much longer or shorter one takes, at most."""

FOREVER_S = 1e9
"""A grace that waits for all."""

GRACES: Mapping[str, float] = {
    "0": 0.0,
    "0.1": 0.1,
    "0.3": 0.3,
    "1": 1.0,
    "for all": FOREVER_S,
    "auto": ADAPTIVE,
}

PRESENT = ((1, 44),)
"""Tensors of a contribution."""


@dataclass(frozen=True)
class Learner:
    """How long its contributions take, and how often it stalls."""

    slowness: float = 1.0
    stalls: float = 0.0
    """Chance that it stands still while it works on one."""
    stalled_s: float = 5.0

    def draw(self, random: np.random.Generator) -> tuple[float, float]:
        """Seconds that it works, and that it is stalled beside."""
        works_s = USUAL_S * self.slowness * (1.0 + random.uniform(-JITTER, JITTER))
        return works_s, self.stalled_s if random.random() < self.stalls else 0.0


@dataclass(frozen=True)
class Case:
    quorum: int
    learners: tuple[Learner, ...]


USUAL, FLAKY = Learner(), Learner(stalls=0.2)

CASES: Mapping[str, Case] = {
    "4 that are alike": Case(3, (USUAL,) * 4),
    "one 1.6 × slower": Case(3, (*(USUAL,) * 3, Learner(1.6))),
    "one 4 × slower": Case(3, (*(USUAL,) * 3, Learner(4.0))),
    "one flaky": Case(3, (*(USUAL,) * 3, FLAKY)),
    "one 4 × slower, one flaky": Case(2, (USUAL, USUAL, Learner(4.0), FLAKY)),
    "of 8, one 4 × slower, two flaky": Case(5, (*(USUAL,) * 5, Learner(4.0), FLAKY, FLAKY)),
}


@dataclass
class Run:
    """One case under one grace."""

    case: Case
    grace_s: float
    seed: int
    now: float = 0.0
    worked_s: float = 0.0
    """On contributions that are decided."""
    stood_s: float = 0.0
    """Stalled, or at work when time was up."""
    _arrivals: list[tuple[float, int]] = field(default_factory=list)
    """(when a contribution is done, whose)."""
    _working_s: dict[int, float] = field(default_factory=dict)
    """Rank -> what its contribution takes."""
    _clocks: dict[int, int] = field(default_factory=dict)

    def share(self, duration_s: float) -> float:
        """Of the time that nobody is stalled, what learners have worked on contributions that count."""
        num_learners = len(self.case.learners)
        terms = Consistency(num_workers=num_learners, quorum=self.case.quorum, grace_s=self.grace_s)
        self._random = np.random.default_rng(self.seed)
        self._coordinator = Coordinator(
            consistency=terms,
            liveness=Liveness(heartbeat_s=duration_s, silence_s=2 * duration_s),
            num_shards=1,
            signer=Signer(b"the bench's own key"),
        )
        for rank in range(num_learners):
            self._coordinator.attached(rank, _client(rank), 0.0)
            self._ask(rank, Join(rank=rank, num_workers=num_learners))
            self._clocks[rank] = 0
            self._begin(rank)
        while self.now < duration_s:
            wake = self._coordinator.next_wake()
            if wake is not None and wake <= self._arrivals[0][0]:
                self.now = max(self.now, wake)
                self._hear(self._coordinator.tick(self.now))
            else:
                self.now, rank = heapq.heappop(self._arrivals)
                self._contribute(rank)
        return self.worked_s / (num_learners * self.now - self.stood_s)

    def _begin(self, rank: int) -> None:
        works_s, stalled_s = self.case.learners[rank].draw(self._random)
        self._working_s[rank] = works_s
        self.stood_s += stalled_s
        heapq.heappush(self._arrivals, (self.now + works_s + stalled_s, rank))

    def _contribute(self, rank: int) -> None:
        """To the open round; to one that it has missed it commits nothing."""
        if self._clocks[rank] < self._coordinator.rounds.log.last:
            self._ask(rank, Commit(round=self._clocks[rank] + 1))
        self._hear(self._ask(rank, Commit(round=self._clocks[rank] + 1, present=PRESENT)))

    def _ask(self, rank: int, message: Join | Commit) -> list[Reply]:
        replies = self._coordinator.handle(
            rank, self._clocks.get(rank, 0) + 1, message, client=_client(rank), now=self.now
        )
        for reply in replies:
            if isinstance(reply.result, Committed):
                self._clocks[reply.conn] = reply.result.next_round - 1
        return replies

    def _hear(self, replies: list[Reply]) -> None:
        """Whoever was answered goes on."""
        for reply in replies:
            assert isinstance(reply.result, Committed), reply.result
            self._clocks[reply.conn] = reply.result.next_round - 1
            self.worked_s += self._working_s[reply.conn]
            self._begin(reply.conn)


def _client(rank: int) -> str:
    return f"{rank:032x}"


def graces(chosen: argparse.Namespace) -> Report:
    turns, duration_s = (1, 400.0) if chosen.quick else (3, 2000.0)
    shares = {
        title: {
            name: [Run(case, grace_s, seed).share(duration_s) for seed in range(turns)]
            for name, grace_s in GRACES.items()
        }
        for title, case in CASES.items()
    }
    return Report(
        subject="graces",
        about="Learners' time that goes into contributions, by the grace, in parts of what a contribution takes.",
        tables=[
            Table(
                "share of the time that learners work and don't wait, median",
                ("case", *GRACES),
                [[title, *(float(np.median(one)) for one in of.values())] for title, of in shares.items()],
            )
        ],
        figures=[{"turns": turns, "duration_s": duration_s, "shares": shares}],
        machine=machine(),
    )


SUBJECT = Subject("graces", __doc__.splitlines()[0], graces, isolated=False)

if __name__ == "__main__":
    run(SUBJECT)
