"""Writes reports into a page, so that no figure in the docs was typed by hand.

    python -m bench.page docs/performance.md REPORT.json... [--plot FOLDER]

What stands between `<!-- bench: SUBJECT -->` and the next `<!-- end -->` is replaced by that subject's report; several
of one subject are its parts. `<!-- bench: all -->` gets the table of all subjects, `<!-- bench: all TEXT -->` the rows
of it that TEXT occurs in.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path

from bench.report import Report, merged, summary_table

PLACE = re.compile(r"(<!-- bench: (\w+) ?([^\n]*?) ?-->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str, reports: Sequence[Report], images: str | None) -> str:
    """`page` with the reports in their places. `images`: path of the charts' folder as seen from the page; None: it
    shows none. Places whose subject is not among the reports stay as they are."""
    subjects = {report.subject: merged([one for one in reports if one.subject == report.subject]) for report in reports}

    def content(place: re.Match[str]) -> str:
        begin, subject, text, end = place.groups()
        if subject == "all":
            return f"{begin}\n{summary_table(list(subjects.values()), text).markdown()}\n\n{end}"
        if subject not in subjects:
            return place.group()
        return f"{begin}\n{_section(subjects[subject], images)}\n\n{end}"

    return PLACE.sub(content, page)


def _section(report: Report, images: str | None) -> str:
    charts = [f"![{chart.title}]({images}/{report.subject}-{chart.name}.png)" for chart in report.charts]
    return "\n\n".join([report.markdown(), *(charts if images else [])])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.page", description="Writes reports into a page.")
    parser.add_argument("page", type=Path)
    parser.add_argument("reports", type=Path, nargs="+", metavar="REPORT.json")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="also draw the charts there, and show them")
    chosen = parser.parse_args()
    reports = [Report.load(path) for path in chosen.reports]
    images = os.path.relpath(chosen.plot, chosen.page.parent) if chosen.plot else None
    chosen.page.write_text(filled(chosen.page.read_text(), reports, images))
    if chosen.plot:
        from bench.plots import draw  # only who draws needs matplotlib

        for report in reports:
            draw(report, chosen.plot / f"{report.subject}.png")


if __name__ == "__main__":
    main()
