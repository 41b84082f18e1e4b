"""The table that most subjects end in: ours, the limit and the peers of one run, with the ratios between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bench.harness import Series
from bench.report import Cell, Chart, Table, spread, three_digits

Role = Literal["psstore", "limit", "peer"]

HEADERS = ("who", "ms: median (min–max)", "× limit", "× best peer", "CPU s per GB")

BORROWED = "borrowed values"
"""How the names of those end who read values where they lie. They are shown, but limits and peers bring values to where
they are wanted, and so does whoever is held against them in a summary."""


@dataclass(frozen=True)
class Entry:
    """One contestant's result."""

    name: str
    role: Role
    series: Series
    num_bytes: int
    """Payload that the workers sent and received in one turn."""
    limit: str = ""
    """How the names of those limits begin by whose fastest it is measured."""


def comparison(title: str, entries: Sequence[Entry]) -> Table:
    """Ratios are of medians: above 1 it took longer than the limit, than the best peer."""
    return Table(title, HEADERS, [_row(entry, entries) for entry in entries])


def comparison_chart(name: str, title: str, groups: dict[str, Sequence[Entry]]) -> Chart:
    series = {group: {entry.name: 1e3 * entry.series.median for entry in found} for group, found in groups.items()}
    return Chart(name=name, title=title, unit="ms", series=series)


def comparison_figures(title: str, entries: Sequence[Entry]) -> list[dict[str, Any]]:
    return [
        {
            "title": title,
            "name": entry.name,
            "role": entry.role,
            "num_bytes": entry.num_bytes,
            "times_s": entry.series.times_s,
            "cpu_times_s": entry.series.cpu_times_s,
        }
        for entry in entries
    ]


def comparison_summary(subject: str, title: str, entries: Sequence[Entry]) -> list[list[Cell]]:
    """A row for the fastest of psstore's entries under each limit."""
    ours = [entry for entry in entries if entry.role == "psstore" and not entry.name.endswith(BORROWED)]
    fastest = [
        min((entry for entry in ours if entry.limit == limit), key=lambda entry: entry.series.median)
        for limit in dict.fromkeys(entry.limit for entry in ours)
    ]
    return [
        [
            subject,
            f"{title}: {entry.name}",
            f"{three_digits(1e3 * entry.series.median)} ms",
            ratio_to_limit(entry, entries),
            ratio_to_best_peer(entry, entries),
        ]
        for entry in fastest
    ]


def ratio_to_limit(entry: Entry, entries: Sequence[Entry]) -> float | None:
    limits = [one for one in entries if one.role == "limit" and one.name.startswith(entry.limit)]
    return _ratio(entry, limits)


def ratio_to_best_peer(entry: Entry, entries: Sequence[Entry]) -> float | None:
    return _ratio(entry, [one for one in entries if one.role == "peer" and one is not entry])


def _ratio(entry: Entry, others: Sequence[Entry]) -> float | None:
    return entry.series.median / min(one.series.median for one in others) if others else None


def milliseconds(series: Series) -> str:
    """Median (min–max)."""
    return spread(*(1e3 * seconds for seconds in (series.median, series.min, series.max)))


def rates(series: Series, num_bytes: float) -> str:
    """Of turns of so many bytes in GB/s: median (min–max)."""
    return spread(*(num_bytes / seconds / 1e9 for seconds in (series.median, series.max, series.min)))


def _row(entry: Entry, entries: Sequence[Entry]) -> list[Cell]:
    return [
        f"**{entry.name}**" if entry.role == "psstore" else entry.name,
        milliseconds(entry.series),
        ratio_to_limit(entry, entries),
        ratio_to_best_peer(entry, entries),
        entry.series.cpu_s_per_gb(entry.num_bytes) if entry.num_bytes else None,
    ]
