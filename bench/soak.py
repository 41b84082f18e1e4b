"""Whether a shard's memory grows with the lives of workers.

    python -m bench.soak [--quick] [--minutes N] [--mode MODE] [--json FILE]

Workers come to a store of two shards over TCP, unix sockets and shared memory, three at a time: each creates what is
there already, trains a few rounds with some of the tensors, and leaves, goes without a word, or is killed in the middle
of a round. What the shards hold is looked at every ten seconds, and after a warm-up a line is laid through it: a store
that forgets nobody rises. The warm-up is a third of the time, and as many lives as a coordinator remembers for ever.
Not among the subjects of `python -m bench`: it takes its time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, count
from multiprocessing.connection import wait
from pathlib import Path
from statistics import linear_regression
from typing import Any

import numpy as np

import psstore
from bench.command import Subject, run
from bench.machine import machine
from bench.processes import store_server
from bench.report import Cell, Report, Table
from psstore.config import Transport
from psstore.protocol.clients import KEPT_AWAY

FORK = multiprocessing.get_context("fork")
"""A life shall not be the imports of its process."""

NUM_SHARDS, NUM_WORKERS, AT_A_TIME = 2, 4, 3
SIZES = (17, 1000, 70_000, 300_000, 2_000_000)
"""Elements of each tensor."""

TRANSPORTS: tuple[Transport, ...] = ("tcp", "unix", "shm")
ENDS = ("leave", "go", "die")
MAX_ROUNDS = 4

MINUTES = 15.0
SAMPLE_S = 10.0
LIFE_S = 60.0
"""For one that hangs: the soak ends with an error."""


# ---- workers ----------------------------------------------------------------------------------------


def live(url: str, number: int) -> None:
    """One life; equal numbers have equal ones."""
    chance = random.Random(number)
    end = chance.choice(ENDS)
    store = psstore.connect(url, transport=chance.choice(TRANSPORTS), timeout_s=LIFE_S)
    for index, size in enumerate(SIZES):
        store.create(f"t{index}", shape=(size,), rule="sgd")
    rounds = chance.randrange(1, MAX_ROUNDS)
    for left in reversed(range(rounds)):
        chosen = chance.sample(range(len(SIZES)), chance.randrange(1, len(SIZES) + 1))
        store.push_many({f"t{index}": np.full(SIZES[index], 1e-3, np.float32) for index in chosen})
        if end == "die" and left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        store.commit({"lr": 0.1})
        store.pull_many([f"t{index}" for index in chosen])
    if end == "leave":
        store.close()
    os._exit(0)


class Lives:
    """`AT_A_TIME` of them, each in a process of its own."""

    def __init__(self, url: str) -> None:
        self.begun = self.failed = 0
        self._url = url
        self._running: list[Any] = []

    def go_on(self, until: float) -> None:
        """Until that time. Raises RuntimeError if nobody's life has ended for LIFE_S."""
        while time.monotonic() < until:
            while len(self._running) < AT_A_TIME:
                self.begun += 1
                self._running.append(FORK.Process(target=live, args=(self._url, self.begun)))
                self._running[-1].start()
            self._bury()

    def finish(self) -> None:
        while self._running:
            self._bury()

    def _bury(self) -> None:
        if not wait([life.sentinel for life in self._running], LIFE_S):
            raise RuntimeError(f"no life has ended for {LIFE_S:g} s")
        for life in [one for one in self._running if one.exitcode is not None]:
            self._running.remove(life)
            self.failed += life.exitcode not in (0, -signal.SIGKILL)
            life.close()


# ---- memory -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """What one shard holds, in KiB."""

    seconds: float
    lives: int
    anonymous: int
    """Of the heap and Python."""
    shared: int
    """Its share of what it has together with clients: values, and what was pushed."""


def shards_here() -> list[int]:
    """Processes that this one, or a child of its, has started as shards."""
    return sorted(pid for pid in _descendants(os.getpid()) if b"psstore.server.shard" in _read(pid, "cmdline"))


def sample(pid: int, *, seconds: float, lives: int) -> Sample:
    lines = (line.split() for line in _read(pid, "smaps_rollup").decode().splitlines()[1:])
    kib = {name: int(amount) for name, amount, *_ in lines}
    return Sample(seconds, lives, kib["Pss_Anon:"], kib["Pss_Shmem:"])


def _descendants(pid: int) -> Iterator[int]:
    for child in map(int, _read(pid, f"task/{pid}/children").split()):
        yield child
        yield from _descendants(child)


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it has ended
        return b""


# ---- report -----------------------------------------------------------------------------------------

HEADERS = ("shard", "memory", "after the warm-up, MiB", "at the end, MiB", "MiB per 1,000 lives", "MiB per hour")


def rows(shard: int, samples: Sequence[Sample]) -> list[list[Cell]]:
    """Of what was sampled after the warm-up."""
    found: list[list[Cell]] = []
    for kind in ("anonymous", "shared"):
        held = [getattr(one, kind) / 1024 for one in samples]
        by_life = slope([one.lives for one in samples], held) * 1000
        by_hour = slope([one.seconds for one in samples], held) * 3600
        found.append([str(shard), kind, *(f"{value:.2f}" for value in (held[0], held[-1], by_life, by_hour))])
    return found


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Of the straight line nearest to the points (least squares); 0 for a single place."""
    if len(set(x)) < 2:
        return 0.0
    return linear_regression(x, y).slope


def soak(arguments: argparse.Namespace) -> Report:
    total_s = 60.0 * (arguments.minutes or (1.0 if arguments.quick else MINUTES))
    with store_server(
        "unix", NUM_SHARDS, workers=NUM_WORKERS, options=["--port", "0", "--mode", arguments.mode]
    ) as url:
        pids, lives, begin = shards_here(), Lives(url), time.monotonic()
        history: list[list[Sample]] = [[] for _ in pids]
        for number in count(1):
            seconds = min(number * SAMPLE_S, total_s)
            lives.go_on(begin + seconds)
            for samples, pid in zip(history, pids, strict=True):
                samples.append(sample(pid, seconds=seconds, lives=lives.begun))
            if seconds == total_s:
                break
        lives.finish()
    if lives.failed == lives.begun:
        raise RuntimeError(f"all {lives.begun} lives of workers failed: that says nothing of memory")
    is_warm = [one.seconds > total_s / 3 and one.lives > KEPT_AWAY for one in history[0]]
    settled = [list(compress(samples, is_warm)) or samples[-1:] for samples in history]
    table = Table("memory", HEADERS, [row for shard, samples in enumerate(settled) for row in rows(shard, samples)])
    return Report(
        "soak",
        f"{lives.begun} lives of workers in {total_s / 60:g} minutes, {lives.failed} of which failed, at a store in"
        f" mode {arguments.mode}.",
        [table],
        notes=[]
        if sum(is_warm) > 1
        else [f"no line: that needs more than {KEPT_AWAY} lives, and some time after them"],
        figures=[{"shard": shard, "samples": [vars(one) for one in of]} for shard, of in enumerate(history)],
        machine=machine(),
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, metavar="N", help=f"how long (default: {MINUTES:g})")
    parser.add_argument("--mode", default="async", choices=("async", "ssp"), help="of the store (default: async)")


SUBJECT = Subject("soak", __doc__.splitlines()[0], soak, add_options, isolated=False)

if __name__ == "__main__":
    run(SUBJECT)
