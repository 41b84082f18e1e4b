"""Writes reports into pages, so that no figure in the docs was typed by hand.

    python -m bench.page [PAGE.md...] REPORT.json... [--plot FOLDER]

Without a page: into all that have places for reports. What stands between such a place and the next `<!-- end -->` is
replaced:

    <!-- bench: SUBJECT -->                that subject's report; several of one subject are its parts
    <!-- bench: SUBJECT TEXT -->           its tables and charts with TEXT in their titles
    <!-- bench: SUBJECT charts TEXT -->    the charts alone
    <!-- bench: all TEXT -->               the table of all subjects: its rows with TEXT in them; without one all
    <!-- bench: targets -->                the table of targets

What a page has of subjects that are not among the reports stays as it is.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from bench.report import Report, Table, by_subject, rows_in, summary_table
from bench.targets import targets_table

PLACE = re.compile(r"(<!-- bench: (\w+) ?([^\n]*?) ?-->\n)(.*?)(<!-- end -->)", re.DOTALL)


def filled(page: str, reports: Sequence[Report], images: str | None) -> str:
    """`page` with the reports, one of a subject, in their places. `images`: path of the charts' folder as seen from the
    page; None: it shows none."""
    subjects = {report.subject: report for report in reports}

    def content(place: re.Match[str]) -> str:
        begin, subject, text, old, end = place.groups()
        if subject == "all":
            return f"{begin}\n{_renewed(rows_in(old), summary_table(reports, text), subjects).markdown()}\n\n{end}"
        if subject == "targets":
            return f"{begin}\n{targets_table(reports, old).markdown()}\n\n{end}"
        if subject not in subjects:
            return place.group()
        return f"{begin}\n{_section(_chosen(subjects[subject], text), images)}\n\n{end}"

    return PLACE.sub(content, page)


def _renewed(old: Sequence[Sequence[str]], table: Table, subjects: Collection[str]) -> Table:
    """`table` with the old rows of subjects that were not measured, and with the subjects in their old order."""
    order = list(dict.fromkeys([*(row[0] for row in old), *subjects]))
    rows = [*(row for row in old if row[0] not in subjects), *table.rows]
    return replace(table, rows=sorted(rows, key=lambda row: order.index(str(row[0]))))


def _chosen(report: Report, text: str) -> Report:
    """What has `text` in its title."""
    _, only_charts, text = text.rpartition("charts")
    text = text.strip()
    charts = [chart for chart in report.charts if text in chart.title]
    if only_charts:
        return replace(report, tables=[], notes=[], charts=charts)
    return replace(report, tables=[table for table in report.tables if text in table.title], charts=charts)


def _section(report: Report, images: str | None) -> str:
    charts = [f"![{chart.title}]({images}/{chart.file_name(report.subject)})" for chart in report.charts]
    return "\n\n".join([report.markdown(), *(charts if images else [])])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.page", description="Writes reports into pages.")
    parser.add_argument("files", type=Path, nargs="+", metavar="[PAGE.md...] REPORT.json...")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="also draw the charts there, and show them")
    chosen = parser.parse_args()
    named = [path for path in chosen.files if path.suffix == ".md"]
    reports = by_subject([Report.load(path) for path in chosen.files if path not in named])
    for page in named or [*Path().glob("*.md"), *Path("docs").glob("*.md")]:
        images = os.path.relpath(chosen.plot, page.parent) if chosen.plot else None
        page.write_text(filled(page.read_text(), reports, images))
    if chosen.plot:
        from bench.plots import draw  # only who draws needs matplotlib

        for report in reports:
            draw(report, chosen.plot / f"{report.subject}.png")


if __name__ == "__main__":
    main()
