"""What a bench found, as values: tables and charts that are saved as JSON, printed as Markdown, and drawn.

A report that was saved can be printed again, so that what stands in the docs is made from files and not by hand.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

Cell = str | float | None

DIVERGES = "diverges"
"""What tables say of a loss at the end that is not below that of knowing nothing."""

SUMMARY_HEADERS = ("subject", "what", "psstore", "× limit", "× best peer")


@dataclass(frozen=True)
class Table:
    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    """Numbers are shown with three digits; None as a dash."""

    def markdown(self) -> str:
        lines = [_line(self.headers), _line(["---"] * len(self.headers))]
        return "\n".join(
            [f"**{self.title}**", "", *lines, *(_line([shown(cell) for cell in row]) for row in self.rows)]
        )


@dataclass(frozen=True)
class Chart:
    """Bars: group → label → length. Lines: label → x → y."""

    name: str
    """Of its file, without ending; may be empty where a report has one chart only."""
    title: str
    unit: str
    """What the lengths, or the heights, are."""
    series: Mapping[str, Mapping[str, float]]
    kind: Literal["bars", "lines"] = "bars"
    x_axis: str = ""

    def file_name(self, subject: str) -> str:
        return "-".join(filter(None, (subject, self.name))) + ".png"


@dataclass(frozen=True)
class Report:
    subject: str
    about: str
    """What was measured and how: one paragraph."""
    tables: Sequence[Table]
    notes: Sequence[str] = ()
    """What was not run, and why; what else the tables don't say."""
    charts: Sequence[Chart] = ()
    figures: Sequence[Mapping[str, Any]] = ()
    """The raw values behind the tables, for programs."""
    summary: Sequence[Sequence[Cell]] = ()
    """Rows under SUMMARY_HEADERS, for the table of all subjects."""
    machine: Mapping[str, str | int] = field(default_factory=dict)
    command: str = ""
    """Which made it."""

    def markdown(self) -> str:
        described = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        parts = [self.about, f"`{self.command}` on: {described}." if self.command else ""]
        parts += [table.markdown() for table in self.tables]
        parts += ["\n".join(f"- {note}" for note in self.notes)]
        return "\n\n".join(part for part in parts if part)

    def save(self, path: Path) -> None:
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> Report:
        saved = json.loads(path.read_text())
        tables = [Table(**table) for table in saved.pop("tables")]
        return cls(tables=tables, charts=[Chart(**chart) for chart in saved.pop("charts")], **saved)


def write_json(path: Path, value: object) -> None:
    """At once: whoever reads it finds this one whole, or the one before. Ends the program if it can't."""
    new = path.with_name(path.name + ".new")
    try:
        new.write_text(json.dumps(value, indent=2) + "\n")
        new.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        sys.exit(f"can't write {path}: {error.strerror}")


def by_subject(reports: Sequence[Report]) -> list[Report]:
    """One of each subject, in the order of its first."""
    subjects = dict.fromkeys(report.subject for report in reports)
    return [merged([one for one in reports if one.subject == subject]) for subject in subjects]


def merged(reports: Sequence[Report]) -> Report:
    """Parts of one subject, run one after the other, as one report."""
    first, *_ = reports
    return replace(
        first,
        tables=[table for report in reports for table in report.tables],
        notes=list(dict.fromkeys(note for report in reports for note in report.notes)),
        charts=_joined([chart for report in reports for chart in report.charts]),
        figures=[figure for report in reports for figure in report.figures],
        summary=[row for report in reports for row in report.summary],
        command="; ".join(dict.fromkeys(report.command for report in reports)),
    )


def _joined(charts: Sequence[Chart]) -> list[Chart]:
    """Charts of one name are one chart, with the series of all."""
    joined: dict[str, Chart] = {}
    for chart in charts:
        known = joined.setdefault(chart.name, replace(chart, series={}))
        more = {label: {**known.series.get(label, {}), **points} for label, points in chart.series.items()}
        joined[chart.name] = replace(known, series={**known.series, **more})
    return list(joined.values())


def summary_table(reports: Sequence[Report], text: str = "") -> Table:
    """What psstore took in every subject, beside the limit and the best peer of the same run. Only of what has `text`
    in it."""
    rows = [row for report in reports for row in report.summary if any(text in str(cell) for cell in row[:2])]
    return Table(text or "All subjects", SUMMARY_HEADERS, rows)


def rows_in(markdown: str) -> list[list[str]]:
    """Of a table that was printed."""
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    return [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines[2:]]


def shown(cell: Cell) -> str:
    if cell is None:
        return "–"
    return cell if isinstance(cell, str) else three_digits(cell)


def spread(median: float, low: float, high: float) -> str:
    """As tables show it under "median (min–max)"."""
    return f"{three_digits(median)} ({three_digits(low)}–{three_digits(high)})"


def three_digits(value: float) -> str:
    """12345 → 12345, 123.4 → 123, 12.34 → 12.3, 1.234 → 1.23."""
    magnitude = abs(value)
    return f"{value:.0f}" if magnitude >= 99.95 else f"{value:.1f}" if magnitude >= 9.995 else f"{value:.2f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
