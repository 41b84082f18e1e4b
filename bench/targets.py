"""What the project wants to reach, beside what reports say of it: a row for each target.

A target is about ratios within one run. It is met if all that were measured are within the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.ratios import (
    BLOCKING,
    LARGE,
    MEMORY,
    NAMED_INPUTS,
    ONE_THREAD,
    RAW,
    SMALL,
    SOCKETS,
    Ratios,
    beside,
    beside_ddp,
    beside_raw,
    beside_redis,
    beside_ring,
    chain_on_links,
    decisions_held,
    eager_on_links,
    faster_than,
    kernels,
    latency,
    loaded,
    longest_steps,
    of_the_ideal,
    scaling,
    sign_beside_floats,
    speed_of,
    times,
    unix_beside_tcp,
)
from bench.report import Cell, Report, Table, rows_in, three_digits

HEADERS = ("subject", "what", "target", "measured", "the limit's own", "met", "what stands in the way")


@dataclass(frozen=True)
class Target:
    subject: str
    what: str
    ratios: Ratios
    at_most: float | None = None
    at_least: float | None = None
    unit: str = ""
    """What the bound is a multiple of, or a share."""
    own: Ratios | None = None
    """The same ratios of the limit in psstore's place: nobody can do better."""
    why: str = ""
    """Of the page: a link to where it says what stands in the way."""

    @property
    def bound(self) -> str:
        sign, value = ("≤", self.at_most) if self.at_most is not None else ("≥", self.at_least)
        return f"{sign} {value:g} {self.unit}".strip()

    def row(self, report: Report) -> list[Cell] | None:
        """None if nothing of it was measured."""
        found = sorted(self.ratios(report))
        if not found:
            return None
        num_met = sum(self._is_met(ratio) for ratio in found)
        met = "yes" if num_met == len(found) else "no" if num_met == 0 else f"{num_met} of {len(found)}"
        own = _ends(sorted(self.own(report))) if self.own else None
        return [self.subject, self.what, self.bound, _ends(found), own, met, "" if met == "yes" else self.why]

    def _is_met(self, ratio: float) -> bool:
        """As it is shown."""
        ratio = round(ratio, 2)
        return ratio <= self.at_most if self.at_most is not None else ratio >= (self.at_least or 0.0)


def _ends(ratios: Sequence[float]) -> str | None:
    """Of a sorted list."""
    return "–".join(dict.fromkeys(three_digits(ratio) for ratio in (ratios[0], ratios[-1]))) if ratios else None


def targets_table(reports: Sequence[Report], old: str = "") -> Table:
    """`old`: the table as it was printed before, which is kept of what was not measured now."""
    of_subject = {report.subject: report for report in reports}
    before = {(row[0], row[1]): row for row in rows_in(old)}
    rows: list[Sequence[Cell]] = []
    for target in TARGETS:
        report = of_subject.get(target.subject)
        row = (report and target.row(report)) or before.get((target.subject, target.what))
        rows.append(row or [target.subject, target.what, target.bound, None, None, None, target.why])
    return Table("Targets", HEADERS, rows)


APART = ("torch", "Redis", "gloo.*per tensor", "ps-lite.*per tensor")
"""Peers that keep tensors apart."""

TARGETS: Sequence[Target] = (
    Target(
        "dense",
        "100 MiB, ResNet-50; tcp",
        beside(LARGE, ("tcp",), RAW),
        at_most=1.10,
        unit="× raw sockets",
        why="[the machine](#where-a-round-goes)",
    ),
    Target(
        "dense",
        "the same; unix",
        beside(LARGE, ("unix",), RAW),
        at_most=1.10,
        unit="× raw sockets",
        why="[staging](#unix-sockets)",
    ),
    Target(
        "dense",
        "the same, over sockets, beside torch.rpc and Redis",
        faster_than(LARGE, "torch", "Redis"),
        at_least=1.5,
        unit="× as fast",
        own=faster_than(LARGE, "torch", "Redis", who="raw sockets"),
        why="[the limit is not](#beside-batched-calls)",
    ),
    Target(
        "dense",
        "the same, beside gloo + SGD",
        faster_than(LARGE, "gloo"),
        at_least=1.5,
        unit="× as fast",
        own=faster_than(LARGE, "gloo", who="raw sockets"),
        why="[half the bytes](#beside-an-all-reduce)",
    ),
    Target(
        "dense",
        "the same, beside ps-lite",
        faster_than(LARGE, "ps-lite"),
        at_least=1.0,
        unit="× as fast",
        own=faster_than(LARGE, "ps-lite", who="raw sockets"),
    ),
    Target(
        "dense",
        "1,000 × 4 KiB, over sockets",
        beside(SMALL, SOCKETS, RAW),
        at_most=1.5,
        unit="× raw sockets",
        why="[per round and slice](#small-tensors)",
    ),
    Target(
        "dense",
        "the same, beside peers that keep tensors apart",
        faster_than(SMALL, *APART),
        at_least=5.0,
        unit="× as fast",
        own=faster_than(SMALL, *APART, who="raw sockets"),
        why="[per round and slice](#small-tensors)",
    ),
    Target(
        "dense",
        "shared memory",
        beside((*LARGE, *SMALL), ("shm",), MEMORY),
        at_most=1.15,
        unit="× copies, SGD",
        why="[shared memory](#shared-memory)",
    ),
    Target(
        "latency",
        "1 KiB, blocking, placed by the kernel",
        latency(beside_raw("")),
        at_most=1.3,
        unit="× ping-pong",
        why="[where a process sleeps](#where-a-process-sleeps)",
    ),
    *(
        Target(
            "latency",
            f"the same, both on {cores}",
            latency(beside_raw(f", {cores}")),
            at_most=1.3,
            unit="× ping-pong",
            why="[where a process sleeps](#where-a-process-sleeps)",
        )
        for cores in ("one core", "two cores")
    ),
    Target(
        "latency",
        "beside Redis",
        latency(beside_redis()),
        at_most=1.0,
        unit="×",
        own=latency(beside_redis(BLOCKING)),
        why="[where a process sleeps](#where-a-process-sleeps)",
    ),
    Target(
        "latency",
        "over unix sockets beside tcp, on the same cores",
        latency(unix_beside_tcp()),
        at_most=1.0,
        unit="×",
        own=latency(unix_beside_tcp(BLOCKING)),
        why="[where a process sleeps](#where-a-process-sleeps)",
    ),
    Target(
        "latency",
        "p99 while another client pushes in bulk",
        latency(loaded()),
        at_most=5.0,
        unit="× idle",
        own=latency(loaded(ONE_THREAD)),
        why="[under load](#under-load)",
    ),
    Target(
        "kernels",
        "W = 4",
        kernels(rf"W = 4, {NAMED_INPUTS}, ", "plain loop"),
        at_least=0.90,
        unit="of the plain loop's rate",
        why="[the kernels](#kernels)",
    ),
    Target(
        "kernels",
        "W = 8",
        kernels(rf"W = 8, {NAMED_INPUTS}, ", "plain loop"),
        at_least=0.90,
        unit="of the plain loop's rate",
        why="[eight gradients](#eight-gradients)",
    ),
    Target(
        "kernels",
        "W = 4, float32",
        kernels("W = 4, float32, 1 thread", "torch sum + fused"),
        at_least=1.7,
        unit="× torch sum + fused",
        own=kernels("W = 4, float32, 1 thread", "torch sum + fused", who="plain loop"),
        why="[eight gradients](#eight-gradients)",
    ),
    Target(
        "kernels",
        "W = 8, float32",
        kernels("W = 8, float32, 1 thread", "torch sum + fused"),
        at_least=1.7,
        unit="× torch sum + fused",
        own=kernels("W = 8, float32, 1 thread", "torch sum + fused", who="plain loop"),
        why="[eight gradients](#eight-gradients)",
    ),
    Target(
        "kernels",
        "W = 4 and 8, float32, two threads",
        kernels("W = [48], float32, 2 thread", "torch sum + fused"),
        at_least=1.7,
        unit="× torch sum + fused",
        own=kernels("W = [48], float32, 2 thread", "torch sum + fused", who="plain loop"),
        why="[eight gradients](#eight-gradients)",
    ),
    Target(
        "kernels",
        "W = 1",
        kernels("W = 1, float32", "torch sum + fused"),
        at_least=1.0,
        unit="× torch fused",
        own=kernels("W = 1, float32", "torch sum + fused", who="plain loop"),
        why="[the kernels](#kernels)",
    ),
    Target(
        "kernels",
        "10,000 small slices",
        kernels("10000 ×", "torch sum + fused"),
        at_least=5.0,
        unit="× torch sum + fused",
        why="[many small slices](#many-small-slices)",
    ),
    Target(
        "scaling",
        "late commit, 1 to 8 shards",
        scaling("psstore, late commit"),
        at_most=1.05,
        unit="× the formula",
        own=scaling("plain sockets, up, then down"),
        why="[scaling](#scaling)",
    ),
    Target(
        "scaling",
        "early commit, 1 to 8 shards",
        scaling("psstore, early commit"),
        at_most=1.05,
        unit="× the formula",
        own=scaling("plain sockets, both ways at once"),
        why="[early commits](#early-commits)",
    ),
    Target(
        "scaling",
        "early commit, 8 workers and shards",
        beside_ring("psstore, early commit"),
        at_most=1.0,
        unit="× ring all-reduce",
        own=beside_ring("plain sockets, both ways at once"),
    ),
    Target("links", "bf16 and int8 both ways", of_the_ideal("bf16", "int8"), at_least=0.95, unit="of the bytes' ratio"),
    Target("links", "1-bit pushes and deltas", sign_beside_floats, at_least=25.0, unit="× as fast as float32"),
    Target(
        "training",
        "one host, 2 workers",
        beside_ddp("psstore"),
        at_least=1.2,
        unit="× DDP's rate",
        own=beside_ddp("no communication"),
        why="[on one host](#on-one-host)",
    ),
    Target(
        "training",
        "links with a rate, early commit",
        eager_on_links,
        at_most=1.10,
        unit="× max(compute, link)",
        own=chain_on_links,
        why="[on links](#on-links)",
    ),
    *(
        Target("checkpoint", what, speed_of(what), at_least=bound, unit="of plain calls' speed")
        for what, bound in (
            ("write", 0.9),
            ("write, 500 MB/s", 0.9),
            ("read, cold", 0.8),
            ("read, 500 MB/s", 0.8),
        )
    ),
    *(
        Target(
            "cuts",
            f"{what} at one version",
            times(f"reading, {count} ", "consistent", "plain"),
            at_most=1.10,
            unit="× a plain pull",
            why="[a second look](#snapshots-and-checkpoints)",
        )
        for what, count in (("20 small tensors", 20), ("64 MiB", 16))
    ),
    *(
        Target(
            "cuts",
            f"a step beside {readers} that take{'s' if bound < 1.1 else ''} snapshots",
            times("readers", f"{readers.replace(' ', ' consistent ')}", "alone"),
            at_most=bound,
            unit="× alone",
            own=times("readers", f"{readers.replace(' ', ' plain ')}", "alone"),
            why="[readers](#snapshots-and-checkpoints)",
        )
        for readers, bound in (("1 reader", 1.02), ("16 readers", 1.10))
    ),
    Target(
        "cuts",
        "a step while a checkpoint is written",
        times("writing", "checkpoint", "alone"),
        at_most=1.10,
        unit="× alone",
        own=times("writing", "plain calls", "alone"),
        why="[two cores](#snapshots-and-checkpoints)",
    ),
    Target(
        "cuts",
        "its p99",
        longest_steps("checkpoint"),
        at_most=2.0,
        unit="× the usual step",
        own=longest_steps("plain calls"),
        why="[the first step](#snapshots-and-checkpoints)",
    ),
    Target(
        "cuts",
        "decisions held when it begins",
        decisions_held("checkpoint"),
        at_most=10.0,
        unit="ms per GB",
        own=decisions_held("plain calls"),
        why="[the first step](#snapshots-and-checkpoints)",
    ),
)
