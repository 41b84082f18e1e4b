"""Draws a report's charts. Needs matplotlib: `pip install psstore[bench]`."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.report import Chart, Report, three_digits

mpl.use("Agg")

OURS, LIMIT, PEER = "#2c7fb8", "#bdbdbd", "#fdae61"
"""Colours: told apart in grey and by the colour-blind, too."""

LIMITS = ("raw", "memory", "plain", "no communication", "torch's fused step, no store")
"""How the names of limits begin."""


def draw(report: Report, path: Path) -> list[Path]:
    """Writes `path` with each chart's name, if it has one, before the ending; returns the files."""
    files = [path.with_name(chart.file_name(path.stem)) for chart in report.charts]
    for chart, file in zip(report.charts, files, strict=True):
        file.parent.mkdir(parents=True, exist_ok=True)
        (_bars if chart.kind == "bars" else _lines)(chart).savefig(file, dpi=110, bbox_inches="tight")
    return files


ALIKE = 4.0
"""Groups whose longest bars differ by more have a scale each: else the shorter ones could not be told apart."""


def _bars(chart: Chart) -> Figure:
    """A column of axes, one for each group, whose bars are sorted as they came."""
    longest = [max(bars.values()) for bars in chart.series.values()]
    alike = max(longest) <= ALIKE * min(longest)
    heights = [0.28 * len(bars) + 0.5 for bars in chart.series.values()]
    figure = Figure(figsize=(8, sum(heights) + 0.8), layout="constrained")
    figure.suptitle(chart.title)
    panels = figure.subplots(len(heights), 1, squeeze=False, sharex=alike, height_ratios=heights)[:, 0]
    for axes, (group, bars) in zip(panels, chart.series.items(), strict=True):
        _bar_panel(axes, group, dict(bars))
    panels[-1].set_xlabel(chart.unit)
    return figure


def _bar_panel(axes: Axes, group: str, bars: dict[str, float]) -> None:
    places = axes.barh(list(bars), list(bars.values()), color=[_colour(label) for label in bars])
    axes.bar_label(places, [three_digits(length) for length in bars.values()], padding=3, fontsize=8)
    axes.set_title(group, fontsize=9, loc="left")
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _colour(label: str) -> str:
    if label.startswith("psstore"):
        return OURS
    return LIMIT if label.startswith(LIMITS) else PEER


def _lines(chart: Chart) -> Figure:
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for label, points in chart.series.items():
        axes.plot([float(x) for x in points], list(points.values()), marker="o", markersize=4, label=label)
    axes.set(title=chart.title, xlabel=chart.x_axis, ylabel=chart.unit, ylim=(0, None))
    axes.legend(fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
