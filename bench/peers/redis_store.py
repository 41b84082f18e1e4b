"""Redis, which keeps bytes and does no arithmetic: every worker SETs its gradients and GETs the others' (its own, if
it is alone) in pipelines, and steps the parameters itself, with the store's kernel. Workers wait for each other by
BLPOP. Nothing is written to disk; hiredis reads the answers; as many processes as a store has, not pinned.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import redis

from bench.comparison import Role
from bench.processes import free_port
from bench.work import Tensors, Work, memory, sgd, tensors

NAME = "Redis"
ROLE: Role = "peer"
IN_ONE_PROCESS = False
SPINS = False

START_S = 10.0
"""For redis-server to listen."""


def why_not(work: Work, transport: str) -> str | None:
    if transport == "shm":
        return "Redis has no shared memory"
    return None if shutil.which("redis-server") else "there is no redis-server (apt-get install redis-server)"


@contextlib.contextmanager
def serve(work: Work, transport: str) -> Iterator[str]:
    """Yields the path of its unix socket, or tcp port."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "redis"
        port = free_port() if transport == "tcp" else 0
        options = ["--save", "", "--appendonly", "no", "--port", str(port), "--unixsocket", str(path), "--dir", folder]
        process = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
        try:
            _wait_for(path)
            yield str(port or path)
        finally:
            process.terminate()
            process.wait()


def join(work: Work, rank: int, where: str) -> RedisWorker:
    return RedisWorker(work, rank, where)


def client(where: str) -> redis.Redis:
    return redis.Redis(port=int(where)) if where.isdigit() else redis.Redis(unix_socket_path=where)


class RedisWorker:
    def __init__(self, work: Work, rank: int, where: str) -> None:
        self._redis = client(where)
        self._rank = rank
        self._others = [other for other in range(work.num_workers) if other != rank]
        self._tensors = tensors(work, rank)
        self._parameters = {name: memory(shape) for name, shape in work.shapes.items()}
        self._round = 0
        self.variants: Mapping[str, Callable[[], None]] = {"SET, GET pipelined": self._exchange}

    @property
    def last(self) -> float:
        return float(list(self._parameters.values())[-1].flat[-1])

    def close(self) -> None:
        self._redis.close()

    def _exchange(self) -> None:
        own = self._tensors.next()
        self._round += 1
        self._set(own)
        for other in self._others:
            self._redis.rpush(f"{other} waits for {self._rank}", self._round)
        for other in self._others:
            self._redis.blpop([f"{self._rank} waits for {other}"])
        self._step(own, [self._get(other) for other in self._others or [self._rank]])

    def _set(self, own: Tensors) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        for name, gradient in own.gradients.items():
            pipeline.set(self._key(self._rank, name), gradient.data.cast("B"))
        pipeline.execute()

    def _get(self, rank: int) -> list[bytes]:
        pipeline = self._redis.pipeline(transaction=False)
        for name in self._parameters:
            pipeline.get(self._key(rank, name))
        return pipeline.execute()

    def _step(self, own: Tensors, received: list[list[bytes]]) -> None:
        for parameter, gradient, *others in zip(
            self._parameters.values(), own.gradients.values(), *received, strict=True
        ):
            flat = [np.frombuffer(other, np.float32) for other in others]
            sgd(parameter.reshape(-1), [gradient.reshape(-1), *flat] if self._others else flat)

    def _key(self, rank: int, name: str) -> str:
        """Of two rounds in turn: the others may still read what was set in the last one."""
        return f"{self._round % 2}/{rank}/{name}"


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + START_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"redis-server does not listen after {START_S} s")
        time.sleep(0.01)
