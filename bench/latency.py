"""How long one small value takes: 1 KiB pushed, 1 KiB pulled, alone and while another client sends in bulk.

    python -m bench.latency [--quick] [--json FILE] [--plot FILE.png]

Axes: transport, peers (callers.py, ping_pong.py), load. The client is this process, the server another one; each caller
makes a burst of calls in turn. Pushes and pulls are of a plain tensor ('assign'). The limit is a ping-pong of as many
bytes, blocking, as the client is; spinning is what blocking costs, also for psstore (`busy_poll_us`). Where both ends
sleep decides much: so both are measured on one core and on two, too, and those that the kernel places are started again
and again, as it mostly leaves two processes where it put them first. Under load the limit has one thread for all
clients, as a shard has. Also: pushes per second with 100 of them under way; and whole steps, by their parts, beside
round trips without an interpreter (small_steps.py).
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from bench.callers import Caller, placements, redis_caller, rpc_caller, store_caller
from bench.calls import BURST, UNDER_WAY, Found, joined, measure_callers, range_of_bursts, typical_s
from bench.command import Subject, run
from bench.harness import Series
from bench.machine import machine
from bench.ping_pong import raw_caller
from bench.processes import preload
from bench.report import Cell, Chart, Report, Table
from bench.small_steps import Stepping, contestants, measure_steps
from bench.small_steps import figures as step_figures
from bench.small_steps import summary as step_summary
from bench.small_steps import table as step_table

STARTS = 10
"""Of those whose places the kernel chooses: one start alone takes a fifth of the time, or five times, by luck."""

HEADERS = (
    "who",
    "push µs: typical (min–max), p99",
    "pull µs: typical (min–max), p99",
    "× raw blocking",
    "CPU µs per push, pull",
    "under load, push µs: p50, p99",
    "p99 under load × idle",
    "p99 under load × raw's",
    "pipelined pushes/s",
)


Start = Callable[[], contextlib.AbstractContextManager[Caller]]


def _placed_by_the_kernel() -> list[Start]:
    sockets = ("tcp", "unix")
    return [
        *(partial(raw_caller, transport) for transport in sockets),
        *(partial(raw_caller, transport, one_thread=True) for transport in sockets),
        *(partial(store_caller, transport) for transport in sockets),
        partial(store_caller, "tcp", shares=True),
        *(partial(redis_caller, transport) for transport in sockets),
    ]


def _started_once() -> list[Start]:
    """Those with cores of their own, and torch.distributed.rpc, which takes seconds to start."""
    apart = placements()[-1]
    spinning: list[Start] = [partial(raw_caller, "tcp", spinning=True, cores=apart)]
    spinning += [partial(store_caller, transport, spinning=True, cores=apart) for transport in ("tcp", "unix")]
    pinned = [
        partial(caller, transport, cores=cores)
        for cores in placements()
        for transport in ("tcp", "unix")
        for caller in (raw_caller, store_caller)
    ]
    return [*pinned, *spinning, rpc_caller]


def measure(chosen: argparse.Namespace) -> Report:
    preload("bench.ping_pong", "bench.native_ping_pong")
    absent: set[str] = set()
    passes: list[list[Found]] = []
    with contextlib.ExitStack() as kept:
        once = _started(kept, _started_once(), absent)
        for _ in range(2 if chosen.quick else STARTS):
            with contextlib.ExitStack() as ends:
                again = _started(ends, _placed_by_the_kernel(), absent)
                passes.append(measure_callers([*again, *once], warm_up=1, rounds=1))
    steps: list[Stepping] = []
    try:
        steps = measure_steps(contestants(), passes=2 if chosen.quick else STARTS)
    except FileNotFoundError as missing:
        absent.add(f"Not run: steps of 1 KiB, {missing}.")
    return report([joined(of_one) for of_one in zip(*passes, strict=True)], sorted(absent), steps)


def _started(ends: contextlib.ExitStack, starts: Iterable[Start], absent: set[str]) -> list[Caller]:
    callers: list[Caller] = []
    for start in starts:
        try:
            callers.append(ends.enter_context(start()))
        except (ImportError, FileNotFoundError) as missing:
            absent.add(f"Not run: {missing}.")
    return callers


def report(found: Sequence[Found], absent: Sequence[str], steps: Sequence[Stepping] = ()) -> Report:
    return Report(
        subject="latency",
        about=(
            "One call at a time of a client that blocks, 1 KiB. × raw blocking: the slower of push and pull by the same"
            " of a ping-pong over the same transport and on the same cores: both ends wake where the kernel likes, or"
            f" share a core, or have one each. Typical is the mean, and min–max the range, of medians of {BURST} calls"
            f" in a row. Where the kernel likes, these are of {STARTS} starts: it leaves two processes on one core, or"
            " on two, as it placed them first. Under load another client sends 16 MiB again and again, to the same"
            " server; × raw's is beside a server that has one thread for all, as a shard has. CPU: client's and"
            " server's processor time. A step is a push, a commit and a pull; × native ping-pong: by three round trips"
            " of as many bytes between two processes without an interpreter."
        ),
        tables=[
            Table("1 KiB", HEADERS, [_row(one, found) for one in found]),
            *([step_table(steps)] if steps else []),
        ],
        notes=absent,
        charts=[_chart(found)],
        figures=[*(_figures(one) for one in found), *step_figures(steps)],
        summary=[
            *(_summary(one, found) for one in found if one.caller.role == "psstore"),
            *step_summary(steps),
        ],
        machine=machine("torch", "redis", "uvloop"),
    )


def _row(one: Found, found: Sequence[Found]) -> list[Cell]:
    name, limit = one.caller.name, _limit(one, found)
    loaded = _limit(one, found, one_thread=True).loaded
    ratio = max(typical_s(one.push) / typical_s(limit.push), typical_s(one.pull) / typical_s(limit.pull))
    return [
        f"**{name}**" if one.caller.role == "psstore" else name,
        _alone(one.push),
        _alone(one.pull),
        ratio,
        _microseconds(one.push.cpu_s, one.pull.cpu_s),
        _microseconds(one.loaded.median, one.loaded.percentile(99)) if one.loaded else None,
        one.loaded.percentile(99) / one.push.percentile(99) if one.loaded else None,
        one.loaded.percentile(99) / loaded.percentile(99) if one.loaded and loaded else None,
        f"{UNDER_WAY / one.pipelined_s:,.0f}",
    ]


def _summary(one: Found, found: Sequence[Found]) -> list[Cell]:
    push_s = typical_s(one.push)
    peers = [typical_s(peer.push) for peer in found if peer.caller.role == "peer"]
    return [
        "latency",
        f"push 1 KiB: {one.caller.name}",
        f"{1e6 * push_s:.0f} µs",
        push_s / typical_s(_limit(one, found).push),
        push_s / min(peers) if peers else None,
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


def _alone(calls: Series) -> str:
    least, largest = range_of_bursts(calls)
    return f"{1e6 * typical_s(calls):.0f} ({1e6 * least:.0f}–{1e6 * largest:.0f}), {1e6 * calls.percentile(99):.0f}"


def _microseconds(*times_s: float) -> str:
    return ", ".join(f"{1e6 * time_s:.0f}" for time_s in times_s)


def _chart(found: Sequence[Found]) -> Chart:
    series = {
        "push": {one.caller.name: 1e6 * typical_s(one.push) for one in found},
        "pull": {one.caller.name: 1e6 * typical_s(one.pull) for one in found},
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
    return {
        "name": one.caller.name,
        "typical_s": {"push": typical_s(one.push), "pull": typical_s(one.pull)},
        "percentiles_s": percentiles,
        "bursts_s": {"push": range_of_bursts(one.push), "pull": range_of_bursts(one.pull)},
        "cpu_s": {kind: series.cpu_s for kind, series in kinds.items() if series is not None},
        "pipelined_s": one.pipelined_s,
    }


SUBJECT = Subject("latency", "1 KiB pushed and pulled, beside raw sockets, Redis and torch.distributed.rpc", measure)

if __name__ == "__main__":
    run(SUBJECT)
