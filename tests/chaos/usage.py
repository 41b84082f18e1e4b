"""What processes take over a long time, in memory and descriptors: looked at again and again, and judged once they have
settled."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import psutil

MIB = 1 << 20

GROWTH_MIB_PER_H = 1.0
"""By how much a process may grow."""

NOISE_MIB = 3.0
"""And by how much besides, however long it was looked at: pages of libraries that it comes to later, and what
allocators keep. A worker whose leader was killed 330 times in half an hour grew by 2.6 MiB, in steps of up to 1.1, all
in its first 13 minutes; it had as many objects, and as many bytes of the heap in use, after its first minute as at
its end."""


@dataclass(frozen=True)
class Sample:
    at_s: float
    memory_bytes: int
    """Resident, what it shares with others included."""
    num_fds: int


@dataclass
class Life:
    """One process, as long as it does one thing: a standby that comes to lead settles anew."""

    name: str
    samples: list[Sample] = field(default_factory=list)

    def settled(self, settle_s: float) -> list[Sample]:
        """What was seen from so long after its beginning on."""
        return [one for one in self.samples if one.at_s >= self.samples[0].at_s + settle_s]


@dataclass(frozen=True)
class Trend:
    """How a life went once it had settled."""

    name: str
    hours: float
    mib_per_h: float
    """The slope of the line through its memory, by least squares."""
    num_fds: tuple[float, float]
    """Medians of its first third and of its last."""

    @property
    def growth_mib(self) -> float:
        """What the line gained."""
        return self.mib_per_h * self.hours

    @property
    def problems(self) -> list[str]:
        most = GROWTH_MIB_PER_H * self.hours + NOISE_MIB
        found = []
        if self.growth_mib > most:
            found.append(f"grew by {self.growth_mib:.2f} MiB in {self.hours:.2f} h, may by {most:.2f}")
        if self.num_fds[1] > self.num_fds[0]:
            found.append(f"had {self.num_fds[0]:g} descriptors, and {self.num_fds[1]:g} later")
        return found


def trend(name: str, samples: Sequence[Sample]) -> Trend:
    """REQUIRES: two samples at least, at different times."""
    times, memory = [one.at_s for one in samples], [one.memory_bytes / MIB for one in samples]
    slope = statistics.linear_regression(times, memory).slope
    third = max(1, len(samples) // 3)
    before, after = ([one.num_fds for one in part] for part in (samples[:third], samples[-third:]))
    hours = (times[-1] - times[0]) / 3600
    return Trend(name, hours, 3600 * slope, (statistics.median(before), statistics.median(after)))


class Usage:
    """What processes take that come and go."""

    def __init__(self, *, settle_s: float, span_s: float) -> None:
        """A process settles for so long; what was seen of it then says something if it is so long."""
        self._settle_s, self._span_s = settle_s, span_s
        self.lives: dict[tuple[int, float, str], Life] = {}
        self.taken_bytes = 0
        """By all of them, when they were looked at last."""

    def look(self, processes: Iterable[tuple[str, psutil.Process]]) -> None:
        """At each, by what it does."""
        self.taken_bytes = 0
        for name, one in processes:
            try:
                with one.oneshot():
                    sample = Sample(time.monotonic(), one.memory_info().rss, one.num_fds())
                    life = self.lives.setdefault((one.pid, one.create_time(), name), Life(name))
            except psutil.Error:  # it has just ended
                continue
            life.samples.append(sample)
            self.taken_bytes += sample.memory_bytes

    def trends(self) -> list[Trend]:
        """One for each life that was long enough, in the order in which they began."""
        found = []
        for life in self.lives.values():
            settled = life.settled(self._settle_s)
            if len(settled) > 1 and settled[-1].at_s - settled[0].at_s >= self._span_s:
                found.append(trend(life.name, settled))
        return found
