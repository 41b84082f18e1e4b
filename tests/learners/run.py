"""A store and its learners, of which somebody is killed again and again, and a reader that notes each decision."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import numpy as np
import psutil
from bench.processes import OPTIMIZERS

import psstore
from psstore.errors import DeadlineExceeded, PsstoreError
from tests.learners.learner import learn
from tests.learners.ledger import Account, Decision, account, awaits_answer, read
from tests.support.server_process import StoreProcess, eventually

_FRESH = multiprocessing.get_context("forkserver")
"""Learners inherit neither threads nor sockets; what takes long to import they have already."""

PATIENCE_S = 60.0
"""For something that is to happen, on a machine that does much else."""

POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Plan:
    seed: int
    kills: int
    num_learners: int = 8
    """At most, for what a step adds to be divided exactly."""
    fragments: int = 1
    """Which take turns."""
    num_shards: int = 2
    between_kills_s: float = 0.5
    """Mean of what lies between two."""
    shard_share: float = 0.1
    """Of kills, those of a shard's leader, whose standby goes on."""
    commit_share: float = 0.5
    """Of a learner's kills, those that wait until it has begun a commit."""


@dataclass(frozen=True)
class Result:
    account: Account
    decisions: int
    unseen: int
    """Decisions that the reader had with the next one at once, whose learners can't be told apart."""
    shard_kills: int


def run(plan: Plan, say: Callable[[str], None]) -> Result:
    """Raises AssertionError if learners or the reader stop to get on."""
    _FRESH.set_forkserver_preload(["tests.learners.learner", OPTIMIZERS])
    flags = ["--shards", str(plan.num_shards), "--workers", str(plan.num_learners)]
    flags += ["--quorum", str(plan.num_learners // 2), "--grace-s", "0.05", "--lost", "drop"]
    flags += ["--standbys", "1"]
    with tempfile.TemporaryDirectory() as folder, StoreProcess(*flags) as store:
        with _learners(store.url, plan, Path(folder)) as learners, _Reader(store.url, plan.fragments) as reader:
            shard_kills = _kill(plan, store.url, learners, reader, say)
            reader.await_more()
        notes = read(Path(folder), plan.num_learners)
    found = account(notes, reader.decisions)
    return Result(found, reader.last, reader.last - len(reader.decisions), shard_kills)


def _kill(plan: Plan, url: str, learners: list[_Learner], reader: _Reader, say: Callable[[str], None]) -> int:
    """All of the plan's. Returns how many were of shards."""
    chance = random.Random(plan.seed)
    shard_kills = 0
    reader.await_more()
    for number in range(1, plan.kills + 1):
        time.sleep(chance.expovariate(1.0 / plan.between_kills_s))
        if chance.random() < plan.shard_share:
            os.kill(chance.choice(_leaders_that_may_die(url)), signal.SIGKILL)
            shard_kills += 1
        else:
            learner = learners[chance.randrange(plan.num_learners)]
            if chance.random() < plan.commit_share:
                learner.await_commit()
            learner.restart()
        if number % 50 == 0:
            reader.await_more()
            say(f"{number} kills, {shard_kills} of them of shards; decision {reader.last}")
    return shard_kills


def _leaders_that_may_die(url: str) -> Sequence[int]:
    """Their processes, as soon as every shard has a standby that is in sync. Raises AssertionError."""
    leaders: list[int] = []

    def may_die() -> bool:
        with contextlib.suppress(PsstoreError), psstore.connect(url, role="client", timeout_s=1.0) as client:
            stats = client.stats()
            leaders[:] = [int(one["process"]) for one in stats]
            return all(one["standbys"] for one in stats)
        return False

    assert eventually(may_die, PATIENCE_S), f"no standby in sync at a shard in {PATIENCE_S} s"
    return leaders


class _Learner:
    """One rank's process, and the next."""

    def __init__(self, url: str, rank: int, plan: Plan, folder: Path) -> None:
        self._arguments = url, rank, plan.num_learners, plan.fragments, folder
        self._process = self._start()

    def restart(self) -> None:
        self.kill()
        self._process = self._start()

    def await_commit(self) -> None:
        """Until it stands still in one that is not answered yet. Raises AssertionError."""
        _, rank, _, _, folder = self._arguments
        process = psutil.Process(self._process.pid)

        def stands_in_it() -> bool:
            process.suspend()
            assert eventually(lambda: process.status() == psutil.STATUS_STOPPED)
            if not awaits_answer(folder, rank):
                process.resume()
                return False
            return True

        assert eventually(stands_in_it, PATIENCE_S), f"rank {rank}: no commit in {PATIENCE_S} s"

    def kill(self) -> None:
        """Raises AssertionError if it has ended by itself, for which there is no reason."""
        assert self._process.is_alive(), f"rank {self._arguments[1]} ended with {self._process.exitcode}"
        self._process.kill()
        self._process.join()

    def _start(self) -> ForkServerProcess:
        process = _FRESH.Process(target=learn, args=self._arguments, daemon=True)
        process.start()
        return process


@contextlib.contextmanager
def _learners(url: str, plan: Plan, folder: Path) -> Iterator[list[_Learner]]:
    learners: list[_Learner] = []
    try:
        for rank in range(plan.num_learners):
            learners.append(_Learner(url, rank, plan, folder))
        yield learners
    finally:
        for one in learners:
            one.kill()


class _Reader:
    """Follows the store, in a thread."""

    def __init__(self, url: str, fragments: int) -> None:
        self._url = url
        self._names = [str(number) for number in range(fragments)]
        self.decisions: list[Decision] = []
        """Those that came one by one."""
        self.last = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._follow)

    def await_more(self) -> None:
        """Until a decision comes. Raises AssertionError."""
        first, until = self.last, time.monotonic() + PATIENCE_S
        while self.last == first:
            assert time.monotonic() < until, f"no decision after {first} in {PATIENCE_S} s"
            time.sleep(POLL_S)

    def __enter__(self) -> _Reader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _follow(self) -> None:
        with psstore.follow(self._url, names=self._names) as reader:
            before = None
            while not self._is_over.is_set():
                try:
                    version = reader.next(timeout_s=1.0)
                except DeadlineExceeded:
                    continue
                values = np.stack([reader.values[name] for name in self._names]).astype(np.float64).sum(axis=0)
                if before is not None and version.number == self.last + 1:
                    self.decisions.append(Decision(version.number, values - before))
                before, self.last = values, version.number
