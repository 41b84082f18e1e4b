"""Measures contestants side by side: in turns and in one process tree, so that what else the machine does slows all
alike. A ratio of two series of one run is a result; a time on a shared machine is not.

Rows and tables of them are report.py's, what the machine is machine.py's, the command line command.py's.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from psstore import _core

T = TypeVar("T")


@dataclass(frozen=True)
class Took:
    """What the part of a turn took that counts, where it has another one that does not."""

    seconds: float
    cpu_seconds: float


Turn = Callable[[], "float | Took | None"]
"""Does the work once. Work that is done in several processes returns the seconds that it took them, from the first
one's beginning to the last one's end; else it is timed from outside."""

CPUCLOCK_SCHED = 2
"""linux/posix-timers.h: the clock of a process's processor time has the number ~pid << 3 | CPUCLOCK_SCHED."""


@dataclass(frozen=True)
class Series:
    """What one contestant took, turn by turn, in seconds."""

    times_s: tuple[float, ...]
    cpu_times_s: tuple[float, ...]
    """Processor time of this process and all below it, of every thread, in each turn."""

    @property
    def median(self) -> float:
        return statistics.median(self.times_s)

    @property
    def min(self) -> float:
        return min(self.times_s)

    @property
    def max(self) -> float:
        return max(self.times_s)

    @property
    def cpu_s(self) -> float:
        return statistics.median(self.cpu_times_s)

    def cpu_s_per_gb(self, num_bytes: float) -> float | None:
        """Of turns that are about so many bytes each."""
        return 1e9 * self.cpu_s / num_bytes if self.cpu_times_s else None

    def percentile(self, percent: float) -> float:
        """The time that so many percent of the turns did not exceed."""
        ordered = sorted(self.times_s)
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


@dataclass
class _Found:
    """A series that grows."""

    times_s: list[float] = field(default_factory=list)
    cpu_times_s: list[float] = field(default_factory=list)


def alternate(
    contestants: Mapping[str, Turn], *, warm_up: int, rounds: int, progress: str = "", turns: int = 1
) -> dict[str, Series]:
    """Lets each contestant take `turns` turns in every round; what the first `warm_up` rounds take is forgotten.

    `progress`: what the line on the terminal says while it lasts.
    """
    found = {name: _Found() for name in contestants}
    processes = process_tree()
    with _progress_line(progress or "measuring", (warm_up + rounds) * len(contestants)) as advance:
        for number in range(warm_up + rounds):
            for name, turn in contestants.items():
                for _ in range(turns):
                    _take(turn, processes, found[name] if number >= warm_up else _Found())
                advance(name)
    return {name: Series(tuple(one.times_s), tuple(one.cpu_times_s)) for name, one in found.items()}


def _take(turn: Turn, processes: list[int], found: _Found) -> None:
    cpu_before = cpu_seconds(processes)
    begin = time.perf_counter()
    own = turn()
    took = Took(time.perf_counter() - begin, cpu_seconds(processes) - cpu_before)
    if own is not None:
        took = own if isinstance(own, Took) else Took(own, took.cpu_seconds)
    found.times_s.append(took.seconds)
    found.cpu_times_s.append(took.cpu_seconds)


def timed(work: Callable[[], object]) -> Took:
    """What that takes, in this process."""
    cpu_before = time.process_time()
    begin = time.perf_counter()
    work()
    return Took(time.perf_counter() - begin, time.process_time() - cpu_before)


@contextlib.contextmanager
def _progress_line(what: str, total: int) -> Iterator[Callable[[str], None]]:
    """On a terminal only; it is gone when all is done. Yields what says that one more step is behind us."""
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as line:
        task = line.add_task(what, total=total)
        yield lambda name: line.update(task, advance=1, description=f"{what}: {name}")


# ---- processor time ----


def process_tree(root: int | None = None) -> list[int]:
    """The ids of this process (or `root`) and all below it."""
    found = [os.getpid() if root is None else root]
    for pid in found:  # grows on the way
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # a thread that ended meanwhile
                found += [int(child) for child in children.read_text().split()]
    return found


def cpu_seconds(processes: list[int]) -> float:
    """Processor time that they have used, with that of threads that ended."""
    total = 0.0
    for pid in processes:
        with contextlib.suppress(OSError):  # a process that ended
            total += time.clock_gettime(~pid << 3 | CPUCLOCK_SCHED)
    return total


# ---- data ----


MOST_SETS = 100
"""More of them would be so small that they are not what is measured."""


MOST_OF_MEMORY = 1 / 64
"""For the sets of one worker of one contestant. A virtual machine may be told of a cache that it has a small part of:
two dozen workers' sets of twice 480 MiB took all of 24 GiB. Where this is less than the cache, the others' sets, which
have their turns in between, are what is more."""


class Rotation(Generic[T]):
    """Sets of data that take turns, so many that they do not fit into the last-level cache together, as far as memory
    goes.

    >>> gradients = Rotation(lambda index: make_gradients(seed=index), num_bytes=100 << 20)
    >>> one_set = gradients.next()
    """

    def __init__(self, make: Callable[[int], T], *, num_bytes: int) -> None:
        """`make(index)`: one set, of `num_bytes`."""
        most = int(_core.machine_memory_bytes() * MOST_OF_MEMORY)
        enough = -(-min(2 * last_level_cache_bytes(), most) // num_bytes)
        self.sets = [make(index) for index in range(min(enough, MOST_SETS))]
        self._next = 0

    def next(self) -> T:
        one = self.sets[self._next]
        self._next = (self._next + 1) % len(self.sets)
        return one


def last_level_cache_bytes() -> int:
    """Of core 0, as the kernel tells; 32 MiB where it does not."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size.removesuffix("K")) << 10 for size in sizes), default=32 << 20)
