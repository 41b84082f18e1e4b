"""What `gpu` found, contest by contest, beside what it is to reach."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.harness import Series
from bench.report import Cell, Table, three_digits

OURS, LIMIT = "psstore", "plain copy"
FUSED, SUMMED = "torch fused", "torch adds + fused"

HEADERS = ("what", "psstore ms: median (min–max)", "GB/s", "plain copy's GB/s", "of the limit", "times as fast as")


@dataclass(frozen=True)
class Contest:
    """What the contestants of one case took. Ours is OURS."""

    part: str
    what: str
    series: dict[str, Series]
    num_bytes: int = 0
    """That ours has to move, at least; the plain copy moves as many. 0: not counted."""
    num_workers: int = 1
    inputs: str = "float32"

    def times_as_fast(self, other: str) -> float | None:
        return self.series[other].median / self.series[OURS].median if other in self.series else None

    @property
    def row(self) -> list[Cell]:
        ours = self.series[OURS]
        peers = [(name, self.times_as_fast(name)) for name in self.series if name not in (OURS, LIMIT)]
        return [
            self.what,
            "{} ({}–{})".format(*(three_digits(1e3 * time) for time in (ours.median, ours.min, ours.max))),
            self.rate(OURS),
            self.rate(LIMIT),
            self.times_as_fast(LIMIT),
            ", ".join(f"{name} {three_digits(ratio)}" for name, ratio in peers if ratio is not None) or None,
        ]

    def rate(self, name: str) -> float | None:
        """In GB/s."""
        return self.num_bytes / self.series[name].median / 1e9 if name in self.series and self.num_bytes else None


@dataclass(frozen=True)
class Target:
    """`at_least` times as fast as `other`, in every contest that it is about."""

    what: str
    part: str
    other: str
    at_least: float
    about: Callable[[Contest], bool] = lambda contest: True

    def verdict(self, contests: Sequence[Contest]) -> list[Cell]:
        """Of the worst contest."""
        found = [
            (ratio, contest.what)
            for contest in contests
            if contest.part == self.part
            and self.about(contest)
            and (ratio := contest.times_as_fast(self.other)) is not None
        ]
        if not found:
            return [self.what, f"≥ {self.at_least:.2f}", None, "not measured"]
        ratio, where = min(found)
        met = "met" if ratio >= self.at_least else "missed"
        return [self.what, f"≥ {self.at_least:.2f}", ratio, f"{met}: {where}"]


TARGETS = (
    Target("steps, × plain copy by bytes", "steps", LIMIT, 0.95),
    Target("steps in float32, × torch fused", "steps", FUSED, 1.10, lambda contest: contest.inputs == "float32"),
    Target("steps in bfloat16, × torch fused", "steps", FUSED, 1.25, lambda contest: contest.inputs == "bfloat16"),
    Target("steps at W = 8, × sum, then fused", "steps", SUMMED, 2.0, lambda contest: contest.num_workers == 8),
    Target("10,000 slices of 4 KiB, × torch fused", "small", FUSED, 3.0),
    Target("host → device → host, × plain copies", "host", LIMIT, 0.90),
    Target("store on the same GPU, × plain copy", "ipc", LIMIT, 0.90),
    Target("training step, × the local fused one", "training", FUSED, 1 / 1.05),
)
"""Of one H200. A target that is about several contests is met if the worst of them meets it."""

TARGET_HEADERS = ("target", "to be", "found", "worst case")


def results(contests: Sequence[Contest]) -> Table:
    return Table("Device times", HEADERS, [contest.row for contest in contests])


def targets(contests: Sequence[Contest]) -> Table:
    return Table("Targets", TARGET_HEADERS, [target.verdict(contests) for target in TARGETS])
