"""One small call after the other, in bursts, alone and while another client sends in bulk: what `latency` finds out of
each caller (callers.py)."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection

from bench.callers import Caller
from bench.harness import Series, Turn, alternate
from bench.processes import FRESH, child

BURST = 200
"""Calls in a turn."""

UNDER_WAY = 100
"""Pushes at once, for operations per second."""


@dataclass
class Calls:
    """One caller's one kind of call, and how long each took."""

    call: Callable[[], object]
    caller: Caller
    load: Load | None = None
    times_s: list[float] = field(default_factory=list)

    def burst(self) -> float:
        with self.caller.around(), self.load or contextlib.nullcontext():
            begin = time.perf_counter()
            for _ in range(BURST):
                before = time.perf_counter()
                self.call()
                self.times_s.append(time.perf_counter() - before)
            return time.perf_counter() - begin

    def series(self, bursts: Series, *, warm_up: int) -> Series:
        """The calls of `bursts`, which `warm_up` others came before."""
        return Series(tuple(self.times_s[warm_up * BURST :]), tuple(one / BURST for one in bursts.cpu_times_s))


class Load:
    """Another client, which sends in bulk within the block."""

    def __init__(self, link: Connection) -> None:
        self._link = link
        self._link.recv()  # it is connected

    def __enter__(self) -> None:
        self._link.send(True)
        self._link.recv()  # it has sent something

    def __exit__(self, *exception: object) -> None:
        self._link.send(False)
        self._link.recv()


@contextlib.contextmanager
def _load(bulk: Callable[[], Callable[[], object]]) -> Iterator[Load]:
    ours, theirs = FRESH.Pipe()
    with child(_send_in_bulk, theirs, bulk), contextlib.closing(ours):
        theirs.close()  # so that the end of the process is the end of the link
        yield Load(ours)


def _send_in_bulk(link: Connection, bulk: Callable[[], Callable[[], object]]) -> None:
    """In a process of its own: while told to, until the link ends."""
    with contextlib.suppress(EOFError):
        send = bulk()
        link.send("connected")
        while link.recv():
            send()
            link.send("sending")
            while not link.poll():
                send()
            link.recv()
            link.send("quiet")


@dataclass(frozen=True)
class Found:
    """One caller's results."""

    caller: Caller
    push: Series
    """Each call's time, and each burst's processor time by its calls."""
    pull: Series
    loaded: Series | None
    pipelined_s: float
    """Median, for UNDER_WAY pushes."""


def measure_callers(callers: Sequence[Caller], *, warm_up: int, rounds: int) -> list[Found]:
    with contextlib.ExitStack() as ends:
        kinds: dict[str, Calls] = {}
        turns: dict[str, Turn] = {}
        for one in callers:
            kinds[f"{one.name}: push"] = Calls(one.push, one)
            kinds[f"{one.name}: pull"] = Calls(one.pull, one)
            if one.bulk is not None:
                kinds[f"{one.name}: loaded"] = Calls(one.push, one, ends.enter_context(_load(one.bulk)))
            turns[f"{one.name}: pipelined"] = partial(_pipelined, one)
        bursts: dict[str, Turn] = {name: calls.burst for name, calls in kinds.items()}
        taken = alternate(bursts | turns, warm_up=warm_up, rounds=rounds, progress="latency")
    series = {name: calls.series(taken[name], warm_up=warm_up) for name, calls in kinds.items()}
    return [
        Found(
            one,
            push=series[f"{one.name}: push"],
            pull=series[f"{one.name}: pull"],
            loaded=series.get(f"{one.name}: loaded"),
            pipelined_s=taken[f"{one.name}: pipelined"].median,
        )
        for one in callers
    ]


def _pipelined(caller: Caller) -> float:
    with caller.around():
        begin = time.perf_counter()
        caller.pipelined(UNDER_WAY)
        return time.perf_counter() - begin


def joined(starts: Sequence[Found]) -> Found:
    """One caller's results of all its starts."""
    loaded = [one.loaded for one in starts if one.loaded is not None]
    return Found(
        starts[0].caller,
        push=_all_of([one.push for one in starts]),
        pull=_all_of([one.pull for one in starts]),
        loaded=_all_of(loaded) if loaded else None,
        pipelined_s=statistics.median(one.pipelined_s for one in starts),
    )


def _all_of(parts: Sequence[Series]) -> Series:
    return Series(
        tuple(time_s for part in parts for time_s in part.times_s),
        tuple(cpu_s for part in parts for cpu_s in part.cpu_times_s),
    )


def typical_s(calls: Series) -> float:
    """The mean of bursts' medians. Where some starts have both ends on one core and others on two, the median of all
    would be one time or the other, by a hair."""
    return statistics.mean(_medians(calls))


def range_of_bursts(calls: Series) -> tuple[float, float]:
    """The least and the largest median of a burst."""
    medians = _medians(calls)
    return min(medians), max(medians)


def _medians(calls: Series) -> list[float]:
    return [statistics.median(calls.times_s[begin : begin + BURST]) for begin in range(0, len(calls.times_s), BURST)]
