"""What a virtual host's link carries during a round: how much, from when on, and how fast.

Read from the interface's counters by a process in that host's network. They count what the kernel hands over as one
packet, with one header, so that a byte of payload counts a little more than once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NamedTuple

from bench.far import FORK, PATIENCE_S, Hosts, forked
from bench.harness import Took, Turn

PERIOD_S = 0.01
"""Between two looks: they cost less than a hundredth of a core."""

BEGUN = 0.005
"""Of all bytes: so many are no greeting any more."""

MIDDLE = (0.05, 0.95)
"""Of all bytes: between what begins a round and what ends it."""


class Look(NamedTuple):
    """At a time, what came to the host and what left it since it is there."""

    time_s: float
    came_bytes: int
    left_bytes: int


@dataclass(frozen=True)
class Carried:
    """By one way of a link in one round."""

    num_bytes: int
    begins_s: float
    """After the round's beginning."""
    middle_bytes_s: float
    """How fast the middle of it went."""


class Meter:
    def __init__(self, link: Connection) -> None:
        self._link = link

    def during(self, turn: Turn) -> Metered:
        return Metered(turn, self)

    def start(self) -> None:
        self._link.send("look")
        self._link.recv()  # it does

    def stop(self) -> list[Look]:
        self._link.send("stop")
        looks: list[Look] = self._link.recv()
        return looks


class Metered:
    """A turn, and what the link carried in the last one."""

    def __init__(self, turn: Turn, meter: Meter) -> None:
        self._turn = turn
        self._meter = meter
        self.up: Carried | None = None
        """To the host."""
        self.down: Carried | None = None

    def __call__(self) -> float | Took | None:
        self._meter.start()
        begin = time.perf_counter()
        took = self._turn()
        looks = self._meter.stop()
        times_s = [one.time_s - begin for one in looks]
        self.up = carried(times_s, [one.came_bytes for one in looks])
        self.down = carried(times_s, [one.left_bytes for one in looks])
        return took


def carried(times_s: Sequence[float], counts: Sequence[int]) -> Carried | None:
    """`counts`: at those times. None if there was nothing."""
    total = counts[-1] - counts[0]

    def reached(share: float) -> tuple[float, int]:
        return next(
            (time_s, count) for time_s, count in zip(times_s, counts, strict=True) if count >= counts[0] + share * total
        )

    (first_s, first), (last_s, last) = (reached(share) for share in MIDDLE)
    if last_s <= first_s:
        return None
    return Carried(total, reached(BEGUN)[0], (last - first) / (last_s - first_s))


@contextlib.contextmanager
def meter(hosts: Hosts, index: int) -> Iterator[Meter]:
    """Of that host's link. Forks: comes before there are threads."""
    ours, theirs = FORK.Pipe()
    process = forked(_look, theirs, hosts, index)
    theirs.close()
    try:
        yield Meter(ours)
    finally:
        with contextlib.suppress(OSError):  # it has ended
            ours.send(None)
        process.join(PATIENCE_S)
        process.terminate()
        process.join()


def _look(link: Connection, hosts: Hosts, index: int) -> None:
    """In a process of its own, until it is told None: again and again, from one word to the next."""
    hosts.move_to(index)
    while link.recv() is not None:
        looks = [look_at(hosts.interface)]
        link.send("looking")
        while not link.poll(PERIOD_S):
            looks.append(look_at(hosts.interface))
        link.recv()
        link.send([*looks, look_at(hosts.interface)])


def look_at(interface: str) -> Look:
    """proc(5): of this thread's network, bytes received and sent are the first and the ninth number."""
    with open("/proc/thread-self/net/dev") as counters:
        line = next(line for line in counters if line.strip().startswith(f"{interface}:"))
    numbers = [int(number) for number in line.partition(":")[2].split()]
    return Look(time.perf_counter(), numbers[0], numbers[8])
