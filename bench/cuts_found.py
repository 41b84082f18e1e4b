"""What a part of `cuts` found of one case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.cuts_user import ALONE
from bench.harness import Series


@dataclass(frozen=True)
class Found:
    """What contestants took in one part of one case."""

    part: str
    title: str
    series: Mapping[str, Series]
    more: Mapping[str, float] = field(default_factory=dict)
    """What else was measured."""

    def ratio(self, who: str, than: str) -> float:
        return self.series[who].median / self.series[than].median

    def cpu_ratio(self, who: str, than: str) -> float:
        return self.series[who].cpu_s / self.series[than].cpu_s

    def tail(self, who: str) -> float:
        return self.series[who].percentile(99) / self.series[ALONE].median

    @property
    def figures(self) -> list[dict[str, Any]]:
        about = {"title": f"{self.part}, {self.title}", **self.more}
        return [{**about, "name": name, "times_s": one.times_s} for name, one in self.series.items()]
