"""What share of its learners' time a store with a quorum and a grace keeps, beside one that waits for all.

    python -m bench.learners [--quick] [--case NAME] [--json FILE]

Learners of DiLoCo share a small model every ten steps. A step's compute is slept, and not computed, and so is what a
program takes to start: what is measured is who waits for whom, on a machine with fewer processors than learners. Only
steps that a finished round of the learner has shared are counted, as a share of those that the learners could have
taken in that time without ever waiting or dying. One case has a learner that takes four times as long; in the other one
learners are killed with SIGKILL by a seeded schedule, the same for both stores, and are started again at once.

Beside them, by arithmetic and in its favour, data parallel training under the same schedule: its workers take each step
together, all start again when one dies, from a checkpoint that took no time, and neither steps nor starts cost more
than what is slept.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator, Sequence
from ctypes import c_int64
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from multiprocessing.sharedctypes import RawArray
from typing import Protocol

import numpy as np

from bench.command import Subject, run
from bench.learners_worker import learn
from bench.machine import machine
from bench.processes import FRESH, OPTIMIZERS, preload, store_server
from bench.report import Report, Table, spread

STEP_S = 0.05
"""Slept in each step."""

START_S = 1.5
"""Slept by a learner that begins in another one's place, before it connects."""

CHECKPOINT_S = 2.0
"""Of training between two checkpoints of data parallel training."""

PATIENCE_S = 60.0
"""For all learners to have had a round, on a busy machine."""

QUORUM, ALL = "quorum of three quarters, grace 0.05 s", "all"
DATA_PARALLEL = "data parallel, by arithmetic"


def options_of(store: str, num_learners: int) -> Sequence[str]:
    """psstore-server's."""
    if store == ALL:
        return ("--rejoin-s", "60")
    return ("--quorum", str(num_learners * 3 // 4), "--grace-s", "0.05", "--lost", "drop")


class Counts(Protocol):
    """Shared steps of each rank, in memory that learners write; no lock, which one that is killed would keep."""

    def __getitem__(self, rank: int) -> int: ...

    def __iter__(self) -> Iterator[int]: ...


@dataclass(frozen=True)
class Case:
    """What is wrong with the learners."""

    name: str
    title: str
    slowness: Sequence[float]
    """Of each, how many times as long it takes."""
    between_kills_s: float | None = None
    """Mean of what lies between two; None: nobody is killed."""
    target: float | None = None
    """Share that is to be reached with a quorum, under failures that leave data parallel from checkpoints 0.58."""

    @property
    def num_learners(self) -> int:
        return len(self.slowness)

    @property
    def steps_a_second(self) -> float:
        """Of all learners, if none waits."""
        return sum(1.0 / (STEP_S * slow) for slow in self.slowness)


CASES = (
    Case("slow", "4 learners, one 4 × slower", slowness=(1.0, 1.0, 1.0, 4.0)),
    Case("killed", "8 learners, one in 4.5 s is killed", slowness=(1.0,) * 8, between_kills_s=4.5, target=0.88),
)


def learners(chosen: argparse.Namespace) -> Report:
    preload("bench.learners_worker", OPTIMIZERS)
    turns, duration_s = (1, 20.0) if chosen.quick else (5, 40.0)
    cases = [case for case in CASES if chosen.case in (None, case.name)]
    shares: dict[str, dict[str, list[float]]] = {case.title: {QUORUM: [], ALL: [], DATA_PARALLEL: []} for case in cases}
    for turn in range(turns):
        for case in cases:
            for store in (QUORUM, ALL):
                shares[case.title][store].append(share(case, store, duration_s, seed=turn))
            shares[case.title][DATA_PARALLEL].append(data_parallel_share(case, duration_s, seed=turn))
    return Report(
        subject="learners",
        about=(
            f"Goodput of learners by the steps that they shared; compute is slept, {STEP_S} s a step and"
            f" {START_S} s a start."
        ),
        tables=[
            Table(
                "share of the steps that could have been taken, median (min–max)",
                ("case", QUORUM, ALL, DATA_PARALLEL, "target of the quorum's"),
                [
                    [
                        case.title,
                        *(spread(float(np.median(one)), min(one), max(one)) for one in shares[case.title].values()),
                        case.target,
                    ]
                    for case in cases
                ],
            )
        ],
        figures=[{"turns": turns, "duration_s": duration_s, "shares": shares}],
        machine=machine(),
    )


def share(case: Case, store: str, duration_s: float, *, seed: int) -> float:
    """Of the steps that could have been taken, those that were shared."""
    options = options_of(store, case.num_learners)
    with store_server("tcp", 1, workers=case.num_learners, options=options) as url, _team(case, url) as team:
        return _shared_steps(team, case, duration_s, seed) / (case.steps_a_second * duration_s)


def data_parallel_share(case: Case, duration_s: float, *, seed: int) -> float:
    """Likewise, of workers that take each step together and all go back to a checkpoint when one dies."""
    up_s = trained_s = 0.0
    for at_s, _ in kills(case, duration_s, seed):
        if at_s > up_s:
            trained_s += (at_s - up_s) // CHECKPOINT_S * CHECKPOINT_S
        up_s = at_s + START_S
    trained_s += max(0.0, duration_s - up_s)
    steps_a_second = case.num_learners / (STEP_S * max(case.slowness))
    return trained_s * steps_a_second / (duration_s * case.steps_a_second)


def _shared_steps(team: Team, case: Case, duration_s: float, seed: int) -> int:
    """Of all learners in that time, which begins when each has shared something."""
    team.wait_for_all()
    before, begin = sum(team.counts), time.monotonic()
    for at_s, rank in kills(case, duration_s, seed):
        time.sleep(max(0.0, begin + at_s - time.monotonic()))
        team.restart(rank)
    time.sleep(max(0.0, begin + duration_s - time.monotonic()))
    return sum(team.counts) - before


def kills(case: Case, duration_s: float, seed: int) -> list[tuple[float, int]]:
    """(when, whose), in order."""
    if case.between_kills_s is None:
        return []
    random = np.random.default_rng(seed)
    times = np.cumsum(random.exponential(case.between_kills_s, size=int(10 * duration_s / case.between_kills_s)))
    return [(float(at_s), int(random.integers(case.num_learners))) for at_s in times if at_s < duration_s]


class Team:
    """The learners' processes."""

    def __init__(self, case: Case, url: str) -> None:
        self.counts: Counts = RawArray(c_int64, case.num_learners)
        self._case, self._url = case, url
        self._processes = [self._start(rank) for rank in range(case.num_learners)]

    def wait_for_all(self) -> None:
        """Until each has shared something. Raises TimeoutError."""
        until = time.monotonic() + PATIENCE_S
        while not all(self.counts):
            if time.monotonic() > until:
                raise TimeoutError(f"after {PATIENCE_S} s learners have shared {list(self.counts)} steps")
            time.sleep(0.01)

    def restart(self, rank: int) -> None:
        """Kills it, whatever it does just then."""
        self._kill(self._processes[rank])
        self._processes[rank] = self._start(rank, START_S)

    def end(self) -> None:
        for process in self._processes:
            self._kill(process)

    def _start(self, rank: int, start_s: float = 0.0) -> ForkServerProcess:
        arguments = (self._url, rank, start_s, STEP_S * self._case.slowness[rank], self.counts)
        process = FRESH.Process(target=learn, args=arguments, daemon=True)
        process.start()
        return process

    def _kill(self, process: ForkServerProcess) -> None:
        process.kill()
        process.join()


@contextlib.contextmanager
def _team(case: Case, url: str) -> Iterator[Team]:
    team = Team(case, url)
    try:
        yield team
    finally:
        team.end()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", choices=[case.name for case in CASES], help="only this one")


SUBJECT = Subject("learners", __doc__.splitlines()[0], learners, add_options)

if __name__ == "__main__":
    run(SUBJECT)
