"""Workers as plain actors: a training that ends with the same bytes whatever becomes of the store's nodes."""

from __future__ import annotations

import itertools
import math
import threading
import time
from importlib import import_module
from typing import Any

import psstore
from psstore.ray import RayStore
from tests.kubernetes.training import PACE_S, train
from tests.support.server_process import StoreProcess

WAIT_S = 100.0
"""How long a worker's call may take while shards come back."""


class Worker:
    """An actor with two threads: one trains, the other one answers."""

    def __init__(self, store: RayStore, rank: int, num_workers: int) -> None:
        store.use()
        self._rank = rank
        self._num_workers = num_workers
        self._last = math.inf
        self._ends: list[float] = []
        """When each step did."""

    def train(self) -> str:
        """The hash of what was trained."""
        place = {"rank": self._rank, "num_workers": self._num_workers}
        with psstore.connect(timeout_s=WAIT_S, wait_s=WAIT_S, **place) as store:  # type: ignore[arg-type]
            return train(store, lambda: self._last, self._took)

    def _took(self, step: int) -> None:
        del self._ends[step - 1 :]  # those that the store has gone back by
        self._ends.append(time.monotonic())
        time.sleep(PACE_S)

    def steps(self) -> int:
        """How many are done."""
        return len(self._ends)

    def end_after(self, last: int) -> None:
        self._last = last

    def longest_s(self, first: int) -> float:
        """Of the steps from that one on."""
        ends = self._ends[max(0, first - 1) :]
        return max((after - before for before, after in itertools.pairwise(ends)), default=0.0)


class Workers:
    """All of them, which have begun to train."""

    def __init__(self, store: RayStore, num_workers: int) -> None:
        self._ray: Any = import_module("ray")
        options = {"num_cpus": 0, "resources": {"worker": 1}, "max_concurrency": 2}
        actor = self._ray.remote(Worker).options(**options)
        self._actors = [actor.remote(store, rank, num_workers) for rank in range(num_workers)]
        self._trained = [worker.train.remote() for worker in self._actors]

    def steps(self) -> int:
        """How many all have done."""
        return int(min(self._ray.get([worker.steps.remote() for worker in self._actors])))

    def await_steps(self, count: int, patience_s: float = WAIT_S) -> None:
        until = time.monotonic() + patience_s
        while self.steps() < count:
            if self._ray.wait(self._trained, timeout=0.05)[0]:
                self._ray.wait(self._trained, num_returns=len(self._trained), timeout=WAIT_S)
                raise AssertionError("\n".join(map(self._failure, self._trained)))
            assert time.monotonic() < until, f"{self.steps()} steps after {patience_s:g} s; expected {count}"

    def _failure(self, trained: Any) -> str:
        try:
            return f"ended with {self._ray.get(trained, timeout=0)}"
        except self._ray.exceptions.RayError as error:
            return str(error)

    def longest_s(self, first: int) -> float:
        return float(max(self._ray.get([worker.longest_s.remote(first) for worker in self._actors])))

    def end(self) -> tuple[int, str]:
        """The number of steps, and the hash that all have come to."""
        last = self.steps() + 50  # further than any of them is when it hears of it
        self._ray.get([worker.end_after.remote(last) for worker in self._actors])
        (digest,) = set(self._ray.get(self._trained, timeout=WAIT_S))
        return last, digest


def undisturbed(num_workers: int, num_steps: int, *, shards: int) -> str:
    """The hash by a store that psstore-server has started."""
    found: dict[int, str] = {}
    with StoreProcess("--shards", str(shards), "--workers", str(num_workers)) as server:

        def work(rank: int) -> None:
            with psstore.connect(server.url, rank=rank, num_workers=num_workers) as store:
                found[rank] = train(store, lambda: num_steps, lambda _: None)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(num_workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    (digest,) = set(found.values())
    return digest


def eventually_whole(store: RayStore, patience_s: float = WAIT_S) -> bool:
    """Whether each shard has a standby in that time."""
    until = time.monotonic() + patience_s
    store.use()
    with psstore.connect(role="client", timeout_s=WAIT_S) as reader:
        while not all(shard["standbys"] for shard in reader.stats()):
            if time.monotonic() > until:
                return False
            time.sleep(0.1)
    return True
