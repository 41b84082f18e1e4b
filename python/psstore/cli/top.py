"""`psstore top`: a store as it trains, again and again on the same screen."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from psstore.cli.choices import fail
from psstore.cli.credentials import with_credentials
from psstore.cli.status import MIB
from psstore.exit_codes import EXIT_MISSING

if TYPE_CHECKING:
    from psstore.client.store import Store
    from psstore.client.store_status import ShardStatus, StoreStatus, WorkerStatus

CLEAR = "\x1b[H\x1b[2J"
"""ANSI: the cursor to the upper left corner, and nothing on the screen."""

MOST_WORKERS = 16
"""Lines for workers: of more, those that are waited for."""


class Look(NamedTuple):
    """A store at one moment."""

    at_s: float
    status: StoreStatus
    answer_s: float
    """How long the slowest shard took to answer."""


@with_credentials
def top(
    url: Annotated[
        str, typer.Argument(metavar="[URL]", help="Of the store (default: PSSTORE_URL).", show_default=False)
    ] = "",
    every: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame, of two looks, and end.")] = False,
) -> None:
    """Show a store as it trains: its speed, bytes, staleness, who is waited for, memory and checkpoints."""
    from psstore.client.connect import connect
    from psstore.client.store_status import CONNECT_S
    from psstore.errors import PsstoreError

    try:
        with connect(url or None, role="client", connect_timeout_s=CONNECT_S) as store:
            for before, now in pairs(store, every):
                text = "\n".join(frame(before, now))
                typer.echo(text if once else CLEAR + text)
                if once:
                    return
    except KeyboardInterrupt:
        return
    except PsstoreError as error:
        fail(error.message, exit_code=EXIT_MISSING)


def pairs(store: Store, every_s: float) -> Iterator[tuple[Look, Look]]:
    """Each look with the one before it. Raises as `Store.stats`."""
    before = look(store)
    while True:
        time.sleep(every_s)
        now = look(store)
        yield before, now
        before = now


def look(store: Store) -> Look:
    from psstore.client.store_status import look_at

    began = time.monotonic()
    status = look_at(store)
    at_s = time.monotonic()
    return Look(at_s, status, at_s - began)


def frame(before: Look, now: Look) -> list[str]:
    """What is shown, in lines."""
    seconds = max(now.at_s - before.at_s, 1e-9)
    status = now.status
    speed = (status.version - before.status.version) / seconds
    lines = [
        f"version {status.version}   {speed:.1f} versions/s   {status.mode}, {status.tensors} tensors,"
        f" {status.commits_waiting} commits wait, answers in {1e3 * now.answer_s:.1f} ms",
        f"checkpoint {_checkpoint(status)}",
    ]
    if status.torn:
        lines.append(f"torn: {status.torn}")
    lines += ["", *_shards(before.status, status, seconds), "", *_workers(before.status, status, seconds)]
    return lines


def _checkpoint(status: StoreStatus) -> str:
    found = status.checkpoint
    last = "none in this life" if found.version is None else f"version {found.version}, {found.age_s:.0f} s ago"
    return last + (f"; {found.failed} failed, the last: {found.failure}" if found.failure else "")


def _shards(before: StoreStatus, now: StoreStatus, seconds: float) -> list[str]:
    lines = ["shard  version    in MiB/s   out MiB/s   staged MiB   memory MiB         conns  waiting  standby"]
    for was, one in zip(before.shards, now.shards, strict=True):
        came, went = (_speed(was, one, name, seconds) for name in ("received_bytes", "sent_bytes"))
        memory = f"{one.memory_bytes / MIB:.0f} of {one.max_memory_bytes / MIB:.0f}"
        staged, standby = one.staged_bytes / MIB, f"{one.standby_lag} behind" if one.standbys else "-"
        lines.append(
            f"{one.shard:<5}  {one.version:<9}  {came:>8.1f}   {went:>9.1f}   {staged:>10.1f}   {memory:<17}"
            f"  {one.connections:>5}  {one.requests_waiting:>7}  {standby}"
        )
    return lines


def _speed(was: ShardStatus, now: ShardStatus, name: str, seconds: float) -> float:
    """MiB per second; since its start, of a process that leads since."""
    grown = getattr(now, name) - (getattr(was, name) if was.process == now.process else 0)
    return max(0.0, float(grown)) / MIB / seconds


class _Wait(NamedTuple):
    worker: WorkerStatus
    share: float
    """Part of the time between the two looks that its commits waited for others."""


def _workers(before: StoreStatus, now: StoreStatus, seconds: float) -> list[str]:
    """Begins with who is waited for."""
    waited_s = {one.rank: one.waited_s for one in before.workers}
    waits = [
        _Wait(one, min(1.0, max(0.0, one.waited_s - waited_s.get(one.rank, 0.0)) / seconds)) for one in now.workers
    ]
    waits.sort(key=lambda one: (one.worker.clock, one.share, one.worker.rank))
    lines = [f"workers {len(now.live)} of {now.num_workers} train" + _gone("lost", now.lost) + _gone("left", now.left)]
    if (slowest := slowest_of(waits)) is not None:
        lines[0] += f"; waited for is rank {slowest}"
    if waits:
        lines.append("rank   round      ahead   waits")
    for one in waits[:MOST_WORKERS]:
        lines.append(f"{one.worker.rank:<5}  {one.worker.clock:<9}  {one.worker.ahead:<5}   {100 * one.share:.0f} %")
    if len(waits) > MOST_WORKERS:
        lines.append(f"and {len(waits) - MOST_WORKERS} more")
    return lines


def slowest_of(waits: list[_Wait]) -> int | None:
    """The rank that the others wait for: it is behind them, or waits clearly less. None: nobody stands out. `waits`:
    those first that may be it."""
    if len(waits) < 2:
        return None
    first, others = waits[0], waits[1:]
    is_behind = first.worker.clock < min(one.worker.clock for one in others)
    waits_less = statistics.median(one.share for one in others) > first.share + 0.1
    return first.worker.rank if is_behind or waits_less else None


def _gone(what: str, ranks: tuple[int, ...]) -> str:
    return f", {what}: {', '.join(map(str, ranks))}" if ranks else ""
