"""`psstore top`: a store as it trains, again and again on the same screen."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from psstore.cli.choices import StoreUrl, fail
from psstore.cli.credentials import with_credentials
from psstore.cli.status import MIB
from psstore.exit_codes import EXIT_MISSING

if TYPE_CHECKING:
    from psstore.client.store import Store
    from psstore.client.store_status import ShardStatus, StoreStatus
    from psstore.launch.slowness import Look, TimeSpent

HOME, CLEAR, REST_OF_LINE, REST_OF_SCREEN = "\x1b[H", "\x1b[2J", "\x1b[K", "\x1b[J"
"""ANSI: the cursor to the upper left corner; nothing on the screen, or from the cursor on. A screen that is cleared
whole each time flickers."""

MOST_WORKERS = 16
"""Lines for workers: of more, those that are waited for."""

LONG_S = 60.0
"""The histogram is of the commits of so long: of few it would jump."""

BAR_CHARACTERS = 40


@with_credentials
def top(
    url: StoreUrl = "",
    every: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame, of two looks, and end.")] = False,
) -> None:
    """Show a store as it trains: its speed, bytes, staleness, who is waited for and why, memory and checkpoints."""
    from psstore.client.connect import connect
    from psstore.client.store_status import CONNECT_S
    from psstore.errors import PsstoreError

    try:
        with connect(url or None, role="client", connect_timeout_s=CONNECT_S) as store:
            clear = CLEAR
            for looks in watch(store, every):
                lines = frame(looks[-2], looks[-1], long_ago=looks[0])
                if once:
                    typer.echo("\n".join(lines))
                    return
                screen = "".join(f"{_styled(line)}{REST_OF_LINE}\n" for line in lines)
                typer.echo(HOME + clear + screen + REST_OF_SCREEN, nl=False)
                clear = ""
    except KeyboardInterrupt:
        return
    except PsstoreError as error:
        fail(error.message, exit_code=EXIT_MISSING)


def watch(store: Store, every_s: float) -> Iterator[deque[Look]]:
    """The looks of the last minute, two at least, each time that there is another one. Where the store goes back, or
    on with other numbers of shards, they begin anew. Raises as `Store.stats`."""
    from psstore.errors import RolledBack

    looks: deque[Look] = deque()
    while True:
        try:
            looks.append(look(store))
        except RolledBack:
            looks.clear()
            store.reconnect()
            continue
        while len(looks) > 2 and looks[-1].at_s - looks[0].at_s > LONG_S:
            looks.popleft()
        if len(looks) > 1:
            yield looks
        time.sleep(every_s)


def look(store: Store) -> Look:
    from psstore.client.store_status import look_at
    from psstore.launch.slowness import Look

    began = time.monotonic()
    status = look_at(store)
    at_s = time.monotonic()
    return Look(at_s, status, at_s - began)


def frame(before: Look, now: Look, *, long_ago: Look | None = None) -> list[str]:
    """What is shown, in lines. `long_ago`: since when the histogram counts (default: `before`)."""
    from psstore.launch.slowness import busy_shards, seconds_between, times_spent, who_and_why

    seconds = seconds_between(before, now)
    status = now.status
    speed = (status.version - before.status.version) / seconds
    busy, found = busy_shards(before, now), times_spent(before, now)
    lines = [
        f"version {status.version}   {speed:.1f} versions/s   {status.mode}, {status.tensors} tensors,"
        f" {status.commits_waiting} commits wait, answers in {1e3 * now.answer_s:.1f} ms",
        f"checkpoint {_checkpoint(status)}",
    ]
    if status.torn:
        lines.append(f"torn: {status.torn}")
    lines += ["", *_shards(before.status, status, busy, seconds), ""]
    lines += [*_workers(found, who_and_why(found, busy, status), status), ""]
    return lines + _staleness((long_ago or before), now)


def _checkpoint(status: StoreStatus) -> str:
    found = status.checkpoint
    last = "none in this life" if found.version is None else f"version {found.version}, {found.age_s:.0f} s ago"
    return last + (f"; {found.failed} failed, the last: {found.failure}" if found.failure else "")


def _shards(before: StoreStatus, now: StoreStatus, busy: list[float], seconds: float) -> list[str]:
    lines = ["shard  version    in MiB/s  out MiB/s  staged MiB  memory MiB         busy  conns  waiting  standby"]
    for was, one, processors in zip(before.shards, now.shards, busy, strict=True):
        came, went = (_speed(was, one, name, seconds) for name in ("received_bytes", "sent_bytes"))
        memory = f"{one.memory_bytes / MIB:.0f} of {one.max_memory_bytes / MIB:.0f}"
        staged, standby = one.staged_bytes / MIB, f"{one.standby_lag} behind" if one.standbys else "-"
        lines.append(
            f"{one.shard:<5}  {one.version:<9}  {came:>8.1f}  {went:>9.1f}  {staged:>10.1f}  {memory:<16}"
            f" {processors:>5.0%}  {one.connections:>5}  {one.requests_waiting:>7}  {standby}"
        )
    return lines


def _speed(was: ShardStatus, now: ShardStatus, name: str, seconds: float) -> float:
    """MiB per second; since its start, of a process that leads since."""
    grown = getattr(now, name) - (getattr(was, name) if was.process == now.process else 0)
    return max(0.0, float(grown)) / MIB / seconds


def _workers(found: list[TimeSpent], slowest: tuple[str, str], status: StoreStatus) -> list[str]:
    """Begins with who is waited for."""
    who, why = slowest
    lines = [
        f"workers {len(status.live)} of {status.num_workers} train"
        + _gone("lost", status.lost)
        + _gone("left", status.left)
        + (f"; waited for is {who}" if who else "")
    ]
    if why:
        lines.append(f"why: {why}" if who else f"nobody is waited for: {why}")
    if found:
        lines.append("rank   round      ahead   in MiB/s  out MiB/s   computes  pushes  pulls  waits")
    for one in found[:MOST_WORKERS]:
        worker, speeds = one.worker, f"{one.pushed_mib_s:>8.1f}  {one.pulled_mib_s:>9.1f}"
        parts = f"{one.computes:>8.0%}  {one.pushes:>6.0%}  {one.pulls:>5.0%}  {one.waits:>5.0%}"
        lines.append(f"{worker.rank:<5}  {worker.clock:<9}  {worker.ahead:<5}   {speeds}   {parts}")
    if len(found) > MOST_WORKERS:
        lines.append(f"and {len(found) - MOST_WORKERS} more")
    return lines


def _staleness(before: Look, now: Look) -> list[str]:
    """A histogram: how far ahead of the slowest workers were when their commits were answered."""
    was = before.status.staleness
    counts = {ahead: max(0, count - was.get(ahead, 0)) for ahead, count in now.status.staleness.items()}
    total = sum(counts.values())
    if total == 0:
        return []
    lines = [f"staleness of the {total} commits of {now.at_s - before.at_s:.0f} s, in rounds ahead of the slowest"]
    for ahead, count in sorted(counts.items()):
        rounds = f"{ahead}" if ahead < 2 else f"{ahead}-{2 * ahead - 1}"
        share = count / total
        lines.append(f"{rounds:<9}  {_bar(share):<{BAR_CHARACTERS}}  {share:>4.0%}")
    return lines


def _bar(share: float) -> str:
    """In eighths of a character, where the terminal has these."""
    eighths = round(8 * BAR_CHARACTERS * share)
    try:
        "\u2588\u258f".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return "#" * (eighths // 8)
    return "\u2588" * (eighths // 8) + (chr(0x2590 - eighths % 8) if eighths % 8 else "")


def _gone(what: str, ranks: tuple[int, ...]) -> str:
    return f", {what}: {', '.join(map(str, ranks))}" if ranks else ""


def _styled(line: str) -> str:
    """For a terminal: headings stand out, and what is wrong or slow more so."""
    if line.startswith(("why: ", "torn: ")) or "; waited for is " in line:
        return typer.style(line, fg="yellow", bold=True)
    is_heading = line.startswith(("version ", "shard ", "workers ", "rank ", "staleness "))
    return typer.style(line, bold=True) if is_heading else line
