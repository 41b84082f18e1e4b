"""A whole training step of one worker with 1 KiB to train, part by part: what `latency` says of it beside the round
trips that it consists of. Also: asking for what is newer of a hundred tensors, when nothing is.

Each contestant has all parts, one after the other, in bursts, as calls do (calls.py). The limit's parts are round trips
of as many bytes: native_ping_pong.py's, and plain sockets', whose commit is a second push.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np

import psstore
from bench.callers import VALUE_ELEMS
from bench.calls import BURST, range_of_bursts, typical_s
from bench.harness import Series, alternate
from bench.native_ping_pong import native_calls
from bench.ping_pong import raw_caller
from bench.processes import store_server
from bench.report import Cell, Table
from psstore.config import Transport
from psstore.types import TensorSpec

PARTS = ("push", "commit", "pull")
"""Of a step, in order."""

ASKING = "nothing newer"
"""Of as many tensors as NUM_UNCHANGED, for a limit one more pull."""

NUM_UNCHANGED = 100

HEADERS = (
    "who",
    "step µs: typical (min–max), p99",
    "× native ping-pong",
    "push µs",
    "commit µs",
    "pull µs",
    f"{NUM_UNCHANGED} tensors, nothing newer, µs",
)


@dataclass
class Stepping:
    """One contestant, and how long each of its parts took, call by call."""

    name: str
    transport: str
    calls: Mapping[str, Callable[[], object]]
    times_s: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in (*PARTS, ASKING)})

    def burst(self) -> None:
        for _ in range(BURST):
            for part, call in self.calls.items():
                before = time.perf_counter()
                call()
                self.times_s[part].append(time.perf_counter() - before)

    def series(self, part: str) -> Series:
        return Series(tuple(self.times_s[part]), ())

    @property
    def steps(self) -> Series:
        return Series(tuple(map(sum, zip(*(self.times_s[part] for part in PARTS), strict=True))), ())


Start = Callable[[], AbstractContextManager[Stepping]]


def contestants() -> list[Start]:
    return [partial(one, transport) for one in (_native, _raw, _store) for transport in ("tcp", "unix")]


@contextlib.contextmanager
def _native(transport: str) -> Iterator[Stepping]:
    with native_calls(transport, (*PARTS, "pull")) as calls:
        yield Stepping(_native_name(transport), transport, dict(zip((*PARTS, ASKING), calls, strict=True)))


def _native_name(transport: str) -> str:
    return f"native ping-pong, {transport}"


@contextlib.contextmanager
def _raw(transport: str) -> Iterator[Stepping]:
    with raw_caller(transport) as raw:
        calls = {"push": raw.push, "commit": raw.push, "pull": raw.pull, ASKING: raw.pull}
        yield Stepping(raw.name, transport, calls)


@contextlib.contextmanager
def _store(transport: str) -> Iterator[Stepping]:
    with contextlib.ExitStack() as ends:
        url = ends.enter_context(store_server(transport, 1))
        store = ends.enter_context(psstore.connect(url, rank=0, transport=cast(Transport, transport)))
        gradient, weights = np.ones(VALUE_ELEMS, np.float32), np.zeros(VALUE_ELEMS, np.float32)
        store.create("trained", weights, rule="sgd")
        names = [f"still {index}" for index in range(NUM_UNCHANGED)]
        still = [np.zeros(VALUE_ELEMS, np.float32) for _ in names]
        store.create_many([TensorSpec(name=name, shape=(VALUE_ELEMS,)) for name in names], still)
        store.pull_many(names, out=still)
        newest = max(map(store.version_of, names))
        calls: dict[str, Callable[[], object]] = {
            "push": lambda: store.push("trained", gradient),
            "commit": lambda: store.commit({"lr": 0.1}),
            "pull": lambda: store.pull("trained", out=weights),
            ASKING: lambda: store.pull_many(names, out=still, if_newer_than=newest),
        }
        yield Stepping(f"psstore, {transport}", transport, calls)


def measure_steps(starts: Sequence[Start], *, passes: int) -> list[Stepping]:
    """Each is started again for every pass, as the kernel leaves its ends where it put them first. Raises
    FileNotFoundError without a C compiler."""
    found: dict[str, Stepping] = {}
    for _ in range(passes):
        with contextlib.ExitStack() as ends:
            started = [ends.enter_context(start()) for start in starts]
            for one in started:
                one.burst()  # to warm up
                one.times_s = found[one.name].times_s if one.name in found else {part: [] for part in one.calls}
                found[one.name] = one
            alternate({one.name: one.burst for one in started}, warm_up=0, rounds=1, progress="steps")
    return list(found.values())


def table(found: Sequence[Stepping]) -> Table:
    return Table("a step of 1 KiB", HEADERS, [_row(one, found) for one in found])


def _row(one: Stepping, found: Sequence[Stepping]) -> list[Cell]:
    least, largest = range_of_bursts(one.steps)
    limit = next(other for other in found if other.name == _native_name(one.transport))
    typical = typical_s(one.steps)
    return [
        f"**{one.name}**" if one.name.startswith("psstore") else one.name,
        f"{1e6 * typical:.0f} ({1e6 * least:.0f}–{1e6 * largest:.0f}), {1e6 * one.steps.percentile(99):.0f}",
        typical / typical_s(limit.steps),
        *(f"{1e6 * typical_s(one.series(part)):.0f}" for part in (*PARTS, ASKING)),
    ]


def figures(found: Sequence[Stepping]) -> list[dict[str, Any]]:
    return [
        {
            "name": f"step: {one.name}",
            "typical_s": {"step": typical_s(one.steps)}
            | {part: typical_s(one.series(part)) for part in (*PARTS, ASKING)},
        }
        for one in found
    ]


def summary(found: Sequence[Stepping]) -> list[list[Cell]]:
    rows = [_row(one, found) for one in found]
    return [
        ["latency", f"a step of 1 KiB: {one.name}", f"{1e6 * typical_s(one.steps):.0f} µs", row[2], None]
        for one, row in zip(found, rows, strict=True)
        if one.name.startswith("psstore")
    ]
