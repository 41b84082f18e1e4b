"""All subjects, one after the other, each in a process of its own, and two tables of what came out: all
subjects, and what was to be reached.

python -m bench [--quick] [--only SUBJECT] [--json FOLDER] [--plot FOLDER]
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.report import Report, summary_table
from bench.targets import targets_table
from psstore.cli.ending import end_as_by_ctrl_c
from psstore.exit_codes import EXIT_SIGNAL

SUBJECTS = (
    "dense",
    "latency",
    "fairness",
    "standbys",
    "restarts",
    "kernels",
    "scaling",
    "links",
    "training",
    "opt_step",
    "connections",
    "compression",
    "coordinator",
    "monitoring",
    "tls",
    "checkpoint",
    "cuts",
    "followers",
    "fan_out",
    "learners",
    "learner_links",
    "learner_loss",
    "learner_time",
    "graces",
    "staleness",
    "stale_learners",
    "rows",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measures all subjects.")
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run, roughly how fast")
    parser.add_argument("--only", action="append", choices=SUBJECTS, help="only this one (may be given twice)")
    parser.add_argument("--json", type=Path, metavar="FOLDER", help="also write SUBJECT.json there")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="also draw charts there: SUBJECT-NAME.png")
    chosen = parser.parse_args()
    end_as_by_ctrl_c()
    with tempfile.TemporaryDirectory() as folder:
        found = {subject: _measured(subject, chosen, Path(folder)) for subject in chosen.only or SUBJECTS}
    reports = [report for report in found.values() if report]
    print(summary_table(reports).markdown(), targets_table(reports).markdown(), sep="\n\n")
    if failed := [subject for subject, report in found.items() if report is None]:
        sys.exit(f"failed: {', '.join(failed)}")


def _measured(subject: str, chosen: argparse.Namespace, folder: Path) -> Report | None:
    """Of a process of its own, which prints its report. None: it failed, and said how."""
    print(f"\n# {subject}\n", flush=True)
    into: Path = chosen.json or folder
    for needed in filter(None, (into, chosen.plot)):
        needed.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", f"bench.{subject}", "--json", str(into / f"{subject}.json")]
    command += ["--quick"] if chosen.quick else []
    command += ["--plot", str(chosen.plot / f"{subject}.png")] if chosen.plot else []
    return None if ended(command) else Report.load(into / f"{subject}.json")


def ended(command: Sequence[str]) -> int:
    """Its exit code. Who ends this program waits until the command has ended what it has started."""
    process = subprocess.Popen(command, start_new_session=True)  # Ctrl-C is for this process alone
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.wait()
        sys.exit(EXIT_SIGNAL + signal.SIGINT)


if __name__ == "__main__":
    main()
