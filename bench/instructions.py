"""Guards the data path against regressions without a clock: instructions per push, commit and pull.

    python -m bench.instructions            # counts, and compares with bench/instructions.json
    python -m bench.instructions --record   # writes what it counted there

Rounds of a fixed workload (bench/counted.py) run under valgrind's callgrind, which counts every instruction of every
thread, Python's included: the same on a busy machine as on an idle one, to some tenths of a percent. A count is not a
time; it tells that a change made something longer, or shorter, whatever the machine does meanwhile.

Another Python or another instruction set has other counts, so the file has a set for each `kind`. Needs valgrind with
its header, and a C compiler for the five lines that tell callgrind where a part ends.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

RECORD = Path(__file__).with_suffix(".json")

MARGIN = 0.05
"""A part may have so many more instructions than were recorded: other compilers and patch releases of Python have. What
is counted twice differs by less than a hundredth."""

MARKS = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; }
void forget(void) { CALLGRIND_ZERO_STATS; }
void dump(const char* name) { CALLGRIND_DUMP_STATS_AT(name); }
void end(void) { CALLGRIND_STOP_INSTRUMENTATION; }
"""

Counts = dict[str, int]
"""Instructions by part and case: 'push 1 KiB'."""


def why_not() -> str | None:
    """Why nothing can be counted here, or None."""
    for program in ("valgrind", "cc"):
        if shutil.which(program) is None:
            return f"counting instructions needs `{program}`"
    tried = subprocess.run(
        ["cc", "-E", "-x", "c", "-"], input="#include <valgrind/callgrind.h>", capture_output=True, text=True
    )
    return None if tried.returncode == 0 else "counting instructions needs valgrind/callgrind.h"


def kind() -> str:
    """Of what counts can be compared. valgrind's processor has AVX2 at most, and only what the real one has."""
    flags = Path("/proc/cpuinfo").read_text().split()
    python = f"{platform.python_implementation()} {sys.version_info.major}.{sys.version_info.minor}"
    return f"{python}, {platform.machine()}{', avx2' if 'avx2' in flags else ''}"


def counted() -> Counts:
    """Of the shortest round. Takes some twenty seconds."""
    with tempfile.TemporaryDirectory() as folder:
        marks, dumps = Path(folder, "marks.so"), Path(folder, "dump")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", marks], input=MARKS.encode(), check=True)
        valgrind = ["valgrind", "--quiet", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={dumps}"]
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        subprocess.run([*valgrind, sys.executable, "-m", "bench.counted", marks], env=environment, check=True)
        rounds = defaultdict(list)
        for dump in Path(folder).glob("dump.*"):
            text = dump.read_text()
            if trigger := re.search(r"^desc: Trigger: Client Request: (.*)$", text, re.MULTILINE):
                rounds[trigger[1]].append(int(_find(r"^totals: (\d+)", text)))
    return {part: min(found) for part, found in sorted(rounds.items())}


def _find(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    assert found is not None, f"callgrind's dump has no {pattern}"
    return found[1]


def recorded() -> Counts | None:
    """What was counted where this one's kind was last recorded; None if it never was."""
    counts: Counts | None = _all_recorded().get(kind())
    return counts


def record(counts: Counts) -> None:
    known = _all_recorded() | {kind(): counts}
    RECORD.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")


def _all_recorded() -> dict[str, Counts]:
    known: dict[str, Counts] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return known


def grown(counts: Counts, before: Counts) -> dict[str, float]:
    """How many times as long the parts are that grew by more than the margin."""
    ratios = {part: counts[part] / before[part] for part in counts.keys() & before.keys()}
    return {part: ratio for part, ratio in sorted(ratios.items()) if ratio > 1 + MARGIN}


def show(counts: Counts, before: Counts | None) -> None:
    print(f"instructions per call, {kind()}")
    print("| part | instructions | recorded | ratio |")
    print("|---|---|---|---|")
    for part, count in counts.items():
        old = (before or {}).get(part)
        print(f"| {part} | {count:,} | {f'{old:,} | {count / old:.3f}' if old else '– | –'} |")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.instructions", description="Instructions per push and pull.")
    parser.add_argument("--record", action="store_true", help=f"write the counts to {RECORD.name}")
    arguments = parser.parse_args()
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 2
    counts, before = counted(), recorded()
    show(counts, before)
    if arguments.record:
        record(counts)
        return 0
    return 1 if before is not None and grown(counts, before) else 0


if __name__ == "__main__":
    sys.exit(main())
