"""A reader of one store, and what it says of each view."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy.typing as npt

import psstore
from psstore.client.store import Store
from psstore.config import Transport
from psstore.errors import VersionGone
from tests.support.cluster import clusters
from tests.torn.cases import NUM_WORKERS, SMALL, WIDE, TornCase, specs
from tests.torn.training import Workers

WAYS = ("snapshot", "pull_many", "pull_many", "pull_many of some", "pull of a wide one", "pull_many of all")
"""Ways to take a view, each as often as it stands here."""


TORN = "torn"

AROUND_A_KILL = 10
"""So many views are taken at once after somebody was killed."""

STEP_S = 60.0
"""For a killed worker's next life to join, on a machine that does much else."""


@dataclass
class Views:
    """What was read of a store, or of many."""

    asked: int = 0
    taken: int = 0
    versions: int = 0
    """How often a view was of a later version than the one before."""
    gone: int = 0
    """Snapshots that were told so while they were read."""
    killed: int = 0
    torn: int = 0
    problems: list[str] = field(default_factory=list)
    """What was torn, older than what was seen before, or not what its version is."""

    def line(self) -> str:
        return (
            f"{self.taken} views, {self.versions} of them of a later version than the one before, {self.killed} workers"
            f" killed, {self.gone} views gone: {self.torn} torn, {len(self.problems) - self.torn} otherwise wrong"
        )

    def add(self, other: Views) -> None:
        self.asked += other.asked
        self.taken += other.taken
        self.versions += other.versions
        self.gone += other.gone
        self.killed += other.killed
        self.torn += other.torn
        self.problems += other.problems


def read(case: TornCase, *, num_views: int, num_kills: int, seed: int) -> Views:
    """Takes so many views while so many workers are killed, spread over them."""
    with clusters(case.transport) as start:
        url = start(shards=case.num_shards, workers=NUM_WORKERS, mode=case.mode).url
        transport = cast(Transport, case.transport)
        with psstore.connect(url, role="client", transport=transport, connections=case.connections) as store:
            store.create_many(specs())
            reader = Reader(store, case, seed)
            workers = Workers(url, case.transport)
            try:
                for kill in range(num_kills + 1):
                    if kill:
                        workers.kill(reader.draw.randrange(NUM_WORKERS))
                        reader.take(AROUND_A_KILL)
                    reader.await_steps()
                    reader.take(num_views * (kill + 1) // (num_kills + 1) - reader.views.asked)
            finally:
                workers.close()
    reader.views.killed = workers.num_killed
    return reader.views


class Reader:
    """Takes views, and looks at each."""

    def __init__(self, store: Store, case: TornCase, seed: int) -> None:
        self._store = store
        self._case = case
        self.draw = random.Random(f"{seed}, {case}")
        self.views = Views()
        self._latest = 0.0

    def await_steps(self) -> None:
        """Until somebody trains: else there is nothing to tear. Raises DeadlineExceeded: nobody does."""
        versions = self._store.follow(SMALL[:1], wait_s=STEP_S)
        next(versions)
        next(versions)

    def take(self, num_views: int) -> None:
        for _ in range(num_views):
            self._take()

    def _take(self) -> None:
        self.views.asked += 1
        way = self.draw.choice(WAYS)
        try:
            version, values = self._read(way)
        except VersionGone:
            self.views.gone += 1
            return
        self.views.taken += 1
        problem = problem_of(values, version, self._latest)
        if problem:
            self.views.problems.append(f"{self._case}: {way}: {problem}")
            self.views.torn += problem.startswith(TORN)
        latest = -float(values[0].flat[0])
        self.views.versions += latest > self._latest
        self._latest = latest

    def _read(self, way: str) -> tuple[int | None, Sequence[npt.NDArray[Any]]]:
        """The version, if it is said, and the values."""
        if way == "snapshot":
            with self._store.snapshot() as view:
                return view.version, view.pull_many(SMALL)
        if way == "pull of a wide one":
            return None, [self._store.pull(WIDE)]
        names = {"pull_many": SMALL, "pull_many of all": (*SMALL, WIDE)}.get(way) or self.draw.sample(SMALL, 3)
        return None, self._store.pull_many(names)


def problem_of(values: Sequence[npt.NDArray[Any]], version: int | None, latest: float) -> str | None:
    """What is wrong with a view, if anything is. `version`: the one that it says it is; `latest`: that of the view
    before."""
    lowest = min(float(value.min()) for value in values)
    highest = max(float(value.max()) for value in values)
    if lowest != highest:
        return f"{TORN}: versions {-highest:g} to {-lowest:g}"
    if version is not None and -lowest != version:
        return f"values of version {-lowest:g}, said to be of {version}"
    if -lowest < latest:
        return f"version {-lowest:g} after {latest:g}"
    return None
