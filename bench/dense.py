"""A training step's traffic: gradients to the store, SGD in it, parameters back, fp32.

    python -m bench.dense [--quick] [--case NAME] [--workers N] [--transport NAME] [--json FILE] [--plot FILE.png]

Axes: tensors (one of 100 MiB, ResNet-50's 161, 1,000 of 4 KiB), workers (1, 2; synchronous), transport (TCP over
loopback, unix sockets, shared memory). Only if asked for, since they take 10 GB of memory: GPT-2's 148 tensors, and 8
workers. Each worker is a process of its own, and so is the one shard, or the peer's server. The contestants are
peers/*.py; of each case all take a round in turn. Arithmetic has one thread everywhere.
"""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.command import Subject, run
from bench.comparison import Entry, comparison, comparison_chart, comparison_figures, comparison_summary
from bench.harness import Turn, alternate
from bench.machine import machine
from bench.peers import Peer, load
from bench.processes import preload
from bench.report import Report
from bench.team import team
from bench.work import Work, gpt2_small, many_small, one_large, resnet

CASES: Mapping[str, Callable[[int], Work]] = {
    "large": one_large,
    "resnet50": resnet,
    "small": many_small,
    "gpt2": gpt2_small,
}

USUAL_CASES = ("large", "resnet50", "small")

WORKERS = (1, 2, 8)

USUAL_WORKERS = (1, 2)

TRANSPORTS = ("tcp", "unix", "shm")

OWN = ("raw_sockets", "memory", "local_step", "store")

PEERS = ("gloo", "torch_rpc", "redis_store", "ps_lite", "ps_lite_kept_memory")

LIMITS: Mapping[str, str] = {
    "tcp": "raw sockets, tcp",
    "unix": "raw sockets, unix",
    "shm": "memory, shm, copies + SGD",
}
"""What each transport's contestants are measured by: the fastest of those limits whose names begin so."""


@dataclass(frozen=True)
class Contestant:
    """A peer over one transport."""

    peer: str
    transport: str

    @property
    def module(self) -> Peer:
        """Raises ImportError where a library is missing."""
        return load(self.peer)

    def why_not(self, work: Work) -> str | None:
        try:
            return self.module.why_not(work, self.transport)
        except ImportError as missing:
            return str(missing)

    def name(self, variant: str) -> str:
        return f"{self.module.NAME}, {self.transport}, {variant}"


def contest(work: Work, contestants: Sequence[Contestant], *, warm_up: int, rounds: int, turns: int = 1) -> list[Entry]:
    """All variants of all of them, which must be able to do it, in turn; `turns`: each so many times in a row."""
    with contextlib.ExitStack() as ends:
        teams = [(one, ends.enter_context(team(one.peer, work, one.transport))) for one in contestants]
        variants: dict[str, Turn] = {}
        owners: dict[str, Contestant] = {}
        for one, its_team in teams:
            for variant, turn in its_team.turns.items():
                variants[one.name(variant)] = turn
                owners[one.name(variant)] = one
        found = alternate(variants, warm_up=warm_up, rounds=rounds, turns=turns, progress=title(work))
        for _, its_team in teams:
            its_team.check()
    return [
        Entry(name, owners[name].module.ROLE, series, work.round_bytes, LIMITS[owners[name].transport])
        for name, series in found.items()
    ]


def title(work: Work) -> str:
    return f"{work.title}, {work.num_workers} worker{'s' if work.num_workers > 1 else ''}"


def measure(chosen: argparse.Namespace) -> Report:
    preload("torch", "bench.team", "bench.peers.store", "bench.peers.raw_sockets")
    transports = chosen.transport or TRANSPORTS
    everybody = [Contestant(peer, transport) for transport in transports for peer in (*OWN, *PEERS)]
    absent: list[str] = []
    found: dict[str, Sequence[Entry]] = {}
    for case in chosen.case or USUAL_CASES:
        for num_workers in chosen.workers or USUAL_WORKERS:
            work = CASES[case](num_workers)
            reasons = {one: one.why_not(work) for one in everybody}
            able = [one for one, reason in reasons.items() if reason is None]
            found[title(work)] = contest(work, able, **_counts(case, quick=chosen.quick))
            absent += [
                f"{one.peer} over {one.transport}: {reason}"
                for one, reason in reasons.items()
                if reason and one.peer in PEERS
            ]
    return _report(found, list(dict.fromkeys(absent)))


def _counts(case: str, *, quick: bool) -> dict[str, int]:
    if case == "small":  # several in a row: else whoever comes after another process would pay for its caches
        return {"warm_up": 1, "rounds": 3 if quick else 9, "turns": 5}
    return {"warm_up": 1, "rounds": 5} if quick else {"warm_up": 2, "rounds": 15}


def _report(found: Mapping[str, Sequence[Entry]], absent: Sequence[str]) -> Report:
    figures: list[Mapping[str, Any]] = []
    for of_case, entries in found.items():
        figures += comparison_figures(of_case, entries)
    return Report(
        subject="dense",
        about=(
            "One round is: every worker's gradients to the store, the SGD step on their mean, all parameters back to"
            " every worker. psstore has one shard."
        ),
        tables=[comparison(of_case, entries) for of_case, entries in found.items()],
        notes=[f"Not run: {reason}." for reason in absent],
        charts=[
            comparison_chart(_slug(of_case), f"push + SGD + pull: {of_case}", _by_transport(entries))
            for of_case, entries in found.items()
        ],
        figures=figures,
        summary=[row for of_case, entries in found.items() for row in comparison_summary("dense", of_case, entries)],
        machine=machine("torch", "redis", "uvloop"),
    )


def _by_transport(entries: Sequence[Entry]) -> dict[str, Sequence[Entry]]:
    """A panel of the chart for each: what is measured by one limit, with that limit."""
    panels = {transport: [entry for entry in entries if entry.limit == limit] for transport, limit in LIMITS.items()}
    return {transport: found for transport, found in panels.items() if found}


def _slug(of_case: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", of_case.lower())


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", action="append", choices=CASES, help="only these tensors (may be given twice)")
    parser.add_argument("--workers", action="append", type=int, choices=WORKERS, help="only so many workers")
    parser.add_argument("--transport", action="append", choices=TRANSPORTS, help="only contestants over this one")


SUBJECT = Subject("dense", "push + SGD + pull beside raw sockets, memcpy, and others' stores", measure, add_options)

if __name__ == "__main__":
    run(SUBJECT)
