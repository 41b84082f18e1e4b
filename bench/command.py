"""The command line that every subject has: `python -m bench.<subject> [--quick] [--json FILE] [--plot FILE.png]`."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from bench.machine import isolate_network
from bench.report import Report
from psstore.cli.ending import end_as_by_ctrl_c
from psstore.exit_codes import EXIT_SIGNAL

BESIDE_JSON = Path()
"""What --plot is without a file."""


@dataclass(frozen=True)
class Subject:
    """Something that can be measured."""

    name: str
    summary: str
    run: Callable[[argparse.Namespace], Report]
    """Measures. The namespace has `quick` and what `add_options` added."""
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    isolated: bool = True
    """Whether it gets a network namespace of its own first, so that all have the same congestion control."""


def run(subject: Subject, arguments: Sequence[str] | None = None) -> Report:
    """Measures, prints, and writes what was asked for. Asked to end, it first ends what it has started."""
    end_as_by_ctrl_c()
    given = sys.argv[1:] if arguments is None else list(arguments)
    output = _output_options()
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{subject.name}", description=subject.summary, parents=[output]
    )
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run, roughly how fast")
    subject.add_options(parser)
    chosen = parser.parse_args(given)
    _check_output(parser, chosen)
    why_not = isolate_network() if subject.isolated else None
    try:
        report = subject.run(chosen)
    except KeyboardInterrupt:
        sys.exit(EXIT_SIGNAL + signal.SIGINT)
    _, measuring = output.parse_known_args(given)
    report = replace(
        report,
        command=shlex.join(["python", "-m", f"bench.{subject.name}", *measuring]),
        notes=[*report.notes, *([why_not] if why_not else [])],
    )
    why_unshown = _show(report)
    _write(report, chosen)
    if why_unshown:
        sys.exit(f"can't show the tables: {why_unshown}")
    return report


def _check_output(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> None:
    """Before anything is measured."""
    if chosen.plot == BESIDE_JSON and not chosen.json:
        parser.error("--plot without a file draws beside the one of --json, which is not given")
    if chosen.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install '.[bench]'")
    for file in (chosen.json, chosen.plot):
        if file and not file.parent.is_dir():
            parser.error(f"there is no folder {file.parent}")


def _write(report: Report, chosen: argparse.Namespace) -> None:
    """To the files that were asked for."""
    if chosen.json:
        report.save(chosen.json)
    if chosen.plot:
        from bench.plots import draw  # only who draws needs matplotlib

        draw(report, chosen.json.with_suffix(".png") if chosen.plot == BESIDE_JSON else chosen.plot)


def _show(report: Report) -> str | None:
    """Why it can't be, as on a full disk or when nobody reads any more."""
    try:
        print(report.markdown(), flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python tries once more at its end
        return error.strerror
    return None


def _output_options() -> argparse.ArgumentParser:
    """Those that have no part in what is measured."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report there")
    parser.add_argument(
        "--plot",
        type=Path,
        nargs="?",
        const=BESIDE_JSON,
        metavar="FILE.png",
        help="also draw charts: FILE-NAME.png for each (default: where --json writes to)",
    )
    return parser
