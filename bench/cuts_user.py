"""Who uses the store that `cuts` measures: trains, reads, leads checkpoints, in this process or in one of its own."""

from __future__ import annotations

import contextlib
import shutil
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, cast

import psstore
from bench.checkpoint import PARTS, Model, write_plainly
from bench.processes import FRESH, child
from bench.work import Floats, memory
from psstore.config import Transport
from psstore.types import TensorSpec

ALONE, CHECKPOINT, DELTA, PLAIN_CALLS = "alone", "checkpoint", "delta", "plain calls"

FIRST_STEPS = 3
"""So many are around the beginning of what is written."""


@dataclass(frozen=True)
class Case:
    """So many parameters of so many bytes."""

    count: int
    tensor_bytes: int

    def __str__(self) -> str:
        return f"{self.count} × {self.tensor_bytes >> 10} KiB"

    @property
    def written_bytes(self) -> int:
        """What a checkpoint of them is: the value, and two buffers of Adam's state."""
        return PARTS * self.count * self.tensor_bytes

    def tensors(self) -> dict[str, Floats]:
        return {f"layer{number}.weight": memory(self.tensor_bytes // 4) for number in range(self.count)}


class Step(NamedTuple):
    """What one step took, and its commit."""

    seconds: float
    commit_s: float


class Trainer(ABC):
    """Who takes steps on a store."""

    def __init__(self, store: psstore.Store) -> None:
        self.store = store

    @abstractmethod
    def create(self) -> None:
        """Has the store have what is trained."""

    @abstractmethod
    def step(self) -> Step: ...

    def steps(self, seconds: float) -> list[Step]:
        """For so long, and one at least."""
        end = time.perf_counter() + seconds
        found = [self.step()]
        while time.perf_counter() < end:
            found.append(self.step())
        return found

    def kept_bytes(self) -> int:
        """What shards keep now for those who read as of a decision."""
        return sum(int(shard["kept_bytes"]) for shard in self.store.stats())


class User(Trainer):
    """One connection, and all that is done by it to a model."""

    def __init__(self, store: psstore.Store, case: Case) -> None:
        super().__init__(store)
        self._case = case
        self._gradients, values = case.tensors(), case.tensors()
        for gradient in self._gradients.values():
            gradient += 1e-3
        self._names, self._out = list(values), list(values.values())
        self._written: Model | None = None

    def create(self) -> None:
        shape = (self._case.tensor_bytes // 4,)
        self.store.create_many([TensorSpec(name=name, shape=shape, rule="adam") for name in self._names])
        self.step()

    def plain(self) -> None:
        self.store.pull_many(self._names, out=self._out, consistent=False)

    def consistent(self) -> None:
        self.store.pull_many(self._names, out=self._out, consistent=True)

    def step(self) -> Step:
        begin = time.perf_counter()
        self.store.push_many(self._gradients)
        pushed = time.perf_counter()
        self.store.commit({"lr": 1e-3})
        committed = time.perf_counter()
        self.plain()
        return Step(time.perf_counter() - begin, committed - pushed)

    def checkpoint(self) -> None:
        self.store.checkpoint()

    def make_written(self) -> None:
        """What `plain_calls` writes."""
        self._written = Model(self._case.written_bytes)

    def plain_calls(self, folder: Path) -> None:
        assert self._written
        write_plainly(self._written, folder)


class Done(NamedTuple):
    """When another process did what it was told, and how often."""

    begin: float
    end: float
    times: int


class Aside:
    """A user in another process, which does one thing at a time: once, or again and again until it is told to end."""

    def __init__(self, link: Connection) -> None:
        self._link = link
        self._link.recv()  # it is connected

    def begin(self, what: str, *arguments: object, every_s: float | None = None, after_s: float = 0.0) -> None:
        """`what`: a User's method. `every_s`: again and again, as often as that, the first time after `after_s`."""
        self._link.send((what, arguments, every_s, after_s))

    def tell_end(self) -> None:
        self._link.send(None)

    @property
    def is_done(self) -> bool:
        return self._link.poll()

    def done(self) -> Done:
        """Waits for it. Raises EOFError: its process has failed, and has said how."""
        found: Done = self._link.recv()
        return found

    def once(self, what: str) -> Done:
        self.begin(what)
        return self.done()


@contextlib.contextmanager
def aside(url: str, case: Case, *, rank: int | None = None, transport: str = "auto") -> Iterator[Aside]:
    """Without a rank it is no worker. Its process ends with the block, and with the one that has the other end of the
    link, however that ends."""
    ours, theirs = FRESH.Pipe()
    with child(_obey, theirs, url, case, rank, transport):
        theirs.close()
        with contextlib.closing(ours):
            yield Aside(ours)


def _obey(link: Connection, url: str, case: Case, rank: int | None, transport: str) -> None:
    with contextlib.suppress(EOFError, ConnectionError), user(url, case, rank=rank, transport=transport) as who:
        link.send(None)
        while True:
            what, arguments, every_s, after_s = link.recv()
            work: Callable[..., object] = getattr(who, what)
            begin = time.perf_counter()
            if every_s is None:
                work(*arguments)
                times = 1
            else:
                times = _again(partial(work, *arguments), link, begin + after_s, every_s)
            link.send(Done(begin, time.perf_counter(), times))


def _again(work: Callable[[], object], link: Connection, due: float, every_s: float) -> int:
    """Until the link says something."""
    times = 0
    while not link.poll(max(0.0, due - time.perf_counter())):
        work()
        times += 1
        due = max(due + every_s, time.perf_counter())
    link.recv()
    return times


@contextlib.contextmanager
def user(url: str, case: Case, *, rank: int | None = None, transport: str = "auto") -> Iterator[User]:
    """Without a rank it is no worker."""
    role: Any = "client" if rank is None else "worker"
    with psstore.connect(url, role=role, rank=rank, transport=cast(Transport, transport)) as store:
        yield User(store, case)


class Writing:
    """A trainer, and another process that writes beside it."""

    def __init__(self, trainer: Trainer, writer: Aside, *, block_s: float) -> None:
        """`block_s`: how long a turn is in which nobody writes."""
        self._trainer = trainer
        self._writer = writer
        self._block_s = block_s
        self.turns: defaultdict[str, list[list[Step]]] = defaultdict(list)
        """Steps of each turn."""
        self.first: defaultdict[str, list[list[Step]]] = defaultdict(list)
        """Steps around the beginning of each writing."""
        self.kept_bytes: defaultdict[str, int] = defaultdict(int)
        """The most that shards kept beside each writing."""

    def alone(self) -> None:
        self.turns[ALONE].append(self._trainer.steps(self._block_s))

    def checkpoint(self) -> float:
        return self._beside(CHECKPOINT, lambda: self._writer.begin("checkpoint"))

    def delta(self) -> float:
        """A checkpoint, of a store whose next one is a delta."""
        return self._beside(DELTA, lambda: self._writer.begin("checkpoint"))

    def plain_calls(self, folder: Path) -> float:
        shutil.rmtree(folder, ignore_errors=True)
        return self._beside(PLAIN_CALLS, lambda: self._writer.begin("plain_calls", folder))

    def _beside(self, what: str, begin: Callable[[], None]) -> float:
        """What the writing took."""
        self._trainer.step()
        begin()
        steps: list[Step] = []
        ends: list[float] = []
        while not steps or not self._writer.is_done:  # it may be over before the first of them
            steps.append(self._trainer.step())
            ends.append(time.perf_counter())
            self.kept_bytes[what] = max(self.kept_bytes[what], self._trainer.kept_bytes())
        done = self._writer.done()
        self.turns[what].append(steps)
        since = [step for step, end in zip(steps, ends, strict=True) if end > done.begin]
        self.first[what].append(since[:FIRST_STEPS] or [self._trainer.step()])  # it may be over between two steps
        return done.end - done.begin
