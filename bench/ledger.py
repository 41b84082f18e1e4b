"""Where a round of `dense` goes: what it costs the workers' processes and the servers', beside those of the limits.

    python -m bench.ledger [--quick] [--case NAME] [--workers N] [--transport NAME] [--json FILE]

Times of one machine differ from hour to hour; who spends them, and on what, differs less. Kernel time of a socket is
nearly all copies, in it what copying to memory costs that is in no cache.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from pathlib import Path

from bench.command import Subject, run
from bench.dense import CASES, OWN, TRANSPORTS, Contestant, title
from bench.harness import Took, Turn, alternate, cpu_seconds
from bench.machine import machine
from bench.processes import preload
from bench.report import Cell, Report, Table
from bench.team import team
from bench.work import Work

HEADERS = ("who", "ms", "processes", "CPU ms", "of it kernel", "page faults", "waits", "preempted")


@dataclass(frozen=True)
class Usage:
    """Of some processes, since they began or in between."""

    cpu_s: float = 0.0
    kernel_s: float = 0.0
    """In ticks of the kernel's, of 10 ms mostly: good for sums of several rounds."""
    faults: int = 0
    waits: int = 0
    """Voluntary context switches."""
    preemptions: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(one + another for one, another in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Usage) -> Usage:
        return Usage(*(one - another for one, another in zip(astuple(self), astuple(other), strict=True)))


@dataclass
class Account:
    """What the rounds of one variant took."""

    sides: dict[str, list[int]]
    """Process ids of the workers, and of their servers."""
    spent: dict[str, list[Usage]] = field(default_factory=dict)
    """Of each side, a round each."""

    def take(self, turn: Turn) -> float | Took | None:
        before = {side: usage(pids) for side, pids in self.sides.items()}
        took = turn()
        for side, pids in self.sides.items():
            self.spent.setdefault(side, []).append(usage(pids) - before[side])
        return took

    def rows(self, name: str, median_s: float, *, warm_up: int) -> list[list[Cell]]:
        """A mean round of each side."""
        rows: list[list[Cell]] = []
        for side, rounds in self.spent.items():
            counted = rounds[warm_up:]
            total = sum(counted, Usage())
            times = [1e3 * seconds / len(counted) for seconds in (total.cpu_s, total.kernel_s)]
            counts = [count / len(counted) for count in (total.faults, total.waits, total.preemptions)]
            rows.append([name, 1e3 * median_s, side, *times, *counts])
        return rows


def usage(pids: Iterable[int]) -> Usage:
    """Until now; nothing of those that are gone."""
    total = Usage()
    for pid in pids:
        with contextlib.suppress(OSError):
            total += _usage_of(pid)
    return total


def _usage_of(pid: int) -> Usage:
    """proc(5): minflt and stime of the process, and its threads' context switches."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    waits = preemptions = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        counts = dict(line.split(":", 1) for line in status.read_text().splitlines() if "ctxt_switches" in line)
        waits += int(counts["voluntary_ctxt_switches"])
        preemptions += int(counts["nonvoluntary_ctxt_switches"])
    kernel_s = int(fields[12]) / os.sysconf("SC_CLK_TCK")
    return Usage(cpu_seconds([pid]), kernel_s, int(fields[7]), waits, preemptions)


def account(work: Work, contestants: Sequence[Contestant], *, warm_up: int, rounds: int) -> Table:
    """All of them, in turn."""
    with contextlib.ExitStack() as ends:
        turns: dict[str, Turn] = {}
        accounts: dict[str, Account] = {}
        for one in contestants:
            its_team = ends.enter_context(team(one.peer, work, one.transport))
            sides = _sides(its_team.processes, 1 if one.module.IN_ONE_PROCESS else work.num_workers)
            for variant, turn in its_team.turns.items():
                name = one.name(variant)
                accounts[name] = Account(sides)
                turns[name] = partial(accounts[name].take, turn)
        found = alternate(turns, warm_up=warm_up, rounds=rounds, progress=title(work))
    rows = [row for name, one in accounts.items() for row in one.rows(name, found[name].median, warm_up=warm_up)]
    return Table(title(work), HEADERS, rows)


def _sides(pids: Sequence[int], num_workers: int) -> dict[str, list[int]]:
    """A team starts its workers last."""
    sides = {"workers": list(pids[-num_workers:]), "server": list(pids[:-num_workers])}
    return {side: its for side, its in sides.items() if its}


def measure(chosen: argparse.Namespace) -> Report:
    preload("torch", "bench.team", "bench.peers.store", "bench.peers.raw_sockets")
    work = CASES[chosen.case](chosen.workers)
    everybody = [Contestant(peer, transport) for transport in chosen.transport or TRANSPORTS for peer in OWN]
    able = [one for one in everybody if one.why_not(work) is None]
    counts = {"warm_up": 1, "rounds": 5} if chosen.quick else {"warm_up": 2, "rounds": 15}
    return Report(
        subject="ledger",
        about="The median round of each, and what a round costs its processes: the mean of all rounds.",
        tables=[account(work, able, **counts)],
        machine=machine("uvloop"),
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", choices=CASES, default="resnet50", help="these tensors")
    parser.add_argument("--workers", type=int, default=1, help="so many workers")
    parser.add_argument("--transport", action="append", choices=TRANSPORTS, help="only contestants over this one")


SUBJECT = Subject("ledger", "what a round of dense costs each side's processes", measure, add_options)

if __name__ == "__main__":
    run(SUBJECT)
