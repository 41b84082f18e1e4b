"""How long one small value takes: 1 KiB pushed, 1 KiB pulled, alone and while another client sends in bulk.

    python -m bench.latency [--quick] [--json FILE] [--plot FILE.png]

Axes: transport, peers (callers.py), load. The client is this process, the server another one; each caller makes a
burst of calls in turn. Pushes and pulls are of a plain tensor ('assign'). The limit is a ping-pong of as many bytes,
blocking, as the client is; spinning is what blocking costs, also for psstore (`busy_poll_us`). Where both ends sleep
decides much: so both are measured on one core and on two, too. Under load the limit has one thread for all clients, as
a shard has. Also: pushes per second with 100 of them under way.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from bench.callers import Caller, placements, raw_caller, redis_caller, rpc_caller, store_caller
from bench.command import Subject, run
from bench.harness import Series, Turn, alternate
from bench.machine import machine
from bench.processes import FRESH, child, preload
from bench.report import Cell, Chart, Report, Table

BURST = 200
"""Calls in a turn."""

UNDER_WAY = 100
"""Pushes at once, for operations per second."""

HEADERS = (
    "who",
    "push µs: p50 (min–max), p99",
    "pull µs: p50 (min–max), p99",
    "× raw blocking (p50)",
    "CPU µs per push, pull",
    "under load, push µs: p50, p99",
    "p99 under load × idle",
    "p99 under load × raw's",
    "pipelined pushes/s",
)


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


def measure(chosen: argparse.Namespace) -> Report:
    preload("bench.callers")
    absent: list[str] = []
    with contextlib.ExitStack() as ends:
        callers = [ends.enter_context(raw_caller("tcp")), ends.enter_context(raw_caller("unix"))]
        callers += [ends.enter_context(raw_caller(where, one_thread=True)) for where in ("tcp", "unix")]
        callers.append(ends.enter_context(raw_caller("tcp", spinning=True)))
        for spinning in (False, True):
            callers += [ends.enter_context(store_caller(where, spinning=spinning)) for where in ("tcp", "unix")]
        callers.append(ends.enter_context(store_caller("tcp", shares=True)))
        for cores in placements():
            for where in ("tcp", "unix"):
                callers.append(ends.enter_context(raw_caller(where, cores=cores)))
                callers.append(ends.enter_context(store_caller(where, cores=cores)))
        for start in (partial(redis_caller, "tcp"), partial(redis_caller, "unix"), rpc_caller):
            try:
                callers.append(ends.enter_context(start()))
            except (ImportError, FileNotFoundError) as missing:
                absent.append(f"Not run: {missing}.")
        counts = {"warm_up": 1, "rounds": 3} if chosen.quick else {"warm_up": 2, "rounds": 12}
        found = measure_callers(callers, **counts)
    return report(found, absent)


def report(found: Sequence[Found], absent: Sequence[str]) -> Report:
    return Report(
        subject="latency",
        about=(
            "One call at a time of a client that blocks, 1 KiB. × raw blocking: the slower of push and pull by the same"
            " of a ping-pong over the same transport and on the same cores: both ends wake where the kernel likes, or"
            " share a core, or have one each. Under load another client sends 16 MiB again and again, to the same"
            " server; × raw's is beside a server that has one thread for all, as a shard has. min–max: the least and"
            f" the largest median of {BURST} calls in a row. CPU: client's and server's processor time."
        ),
        tables=[Table("1 KiB", HEADERS, [_row(one, found) for one in found])],
        notes=absent,
        charts=[_chart(found)],
        figures=[_figures(one) for one in found],
        summary=[_summary(one, found) for one in found if one.caller.role == "psstore"],
        machine=machine("torch", "redis", "uvloop"),
    )


def _row(one: Found, found: Sequence[Found]) -> list[Cell]:
    name, limit = one.caller.name, _limit(one, found)
    loaded = _limit(one, found, one_thread=True).loaded
    ratio = max(one.push.median / limit.push.median, one.pull.median / limit.pull.median)
    return [
        f"**{name}**" if one.caller.role == "psstore" else name,
        _percentiles(one.push, range_of_bursts(one.push)),
        _percentiles(one.pull, range_of_bursts(one.pull)),
        ratio,
        f"{1e6 * one.push.cpu_s:.0f}, {1e6 * one.pull.cpu_s:.0f}",
        _percentiles(one.loaded) if one.loaded else None,
        one.loaded.percentile(99) / one.push.percentile(99) if one.loaded else None,
        one.loaded.percentile(99) / loaded.percentile(99) if one.loaded and loaded else None,
        f"{UNDER_WAY / one.pipelined_s:,.0f}",
    ]


def _summary(one: Found, found: Sequence[Found]) -> list[Cell]:
    peers = [peer.push.median for peer in found if peer.caller.role == "peer"]
    return [
        "latency",
        f"push 1 KiB: {one.caller.name}",
        f"{1e6 * one.push.median:.0f} µs",
        one.push.median / _limit(one, found).push.median,
        one.push.median / min(peers) if peers else None,
    ]


def _limit(one: Found, found: Sequence[Found], *, one_thread: bool = False) -> Found:
    """The blocking ping-pong over the same transport, on the same cores, which comes first; or with such a server, if
    there is one."""
    limits = [
        limit
        for limit in found
        if limit.caller.role == "limit"
        and (limit.caller.transport, limit.caller.cores) == (one.caller.transport, one.caller.cores)
    ]
    return next((limit for limit in limits if limit.caller.one_thread == one_thread), limits[0])


def range_of_bursts(calls: Series) -> tuple[float, float]:
    """The least and the largest median of a burst."""
    bursts = [calls.times_s[begin : begin + BURST] for begin in range(0, len(calls.times_s), BURST)]
    medians = [statistics.median(burst) for burst in bursts]
    return min(medians), max(medians)


def _percentiles(series: Series, ends: tuple[float, float] | None = None) -> str:
    shown = "" if ends is None else f" ({1e6 * ends[0]:.0f}–{1e6 * ends[1]:.0f})"
    return f"{1e6 * series.percentile(50):.0f}{shown}, {1e6 * series.percentile(99):.0f}"


def _chart(found: Sequence[Found]) -> Chart:
    series = {
        "push, p50": {one.caller.name: 1e6 * one.push.percentile(50) for one in found},
        "pull, p50": {one.caller.name: 1e6 * one.pull.percentile(50) for one in found},
        "push under load, p99": {
            one.caller.name: 1e6 * one.loaded.percentile(99) for one in found if one.loaded is not None
        },
    }
    return Chart("1kib", "1 KiB, one call at a time", "µs", series)


def _figures(one: Found) -> dict[str, Any]:
    kinds = {"push": one.push, "pull": one.pull, "loaded": one.loaded}
    percentiles = {
        kind: {str(percent): series.percentile(percent) for percent in (1, 10, 50, 90, 99)}
        for kind, series in kinds.items()
        if series is not None
    }
    ranges = {"push": range_of_bursts(one.push), "pull": range_of_bursts(one.pull)}
    return {
        "name": one.caller.name,
        "percentiles_s": percentiles,
        "bursts_s": ranges,
        "cpu_s": {kind: series.cpu_s for kind, series in kinds.items() if series is not None},
        "pipelined_s": one.pipelined_s,
    }


SUBJECT = Subject("latency", "1 KiB pushed and pulled, beside raw sockets, Redis and torch.distributed.rpc", measure)

if __name__ == "__main__":
    run(SUBJECT)
