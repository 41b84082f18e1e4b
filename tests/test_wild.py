"""A script as people have them (tests/wild/train.py) and the same with psstore.patch: both learn, and each can go on
from the other's checkpoint."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import fork_server

RUN_S = 110.0

pytestmark = pytest.mark.timeout(3 * RUN_S)

ON_STORE = ("-m", "psstore.cli.main", "run", "--shards", "2", "--workers", "2")

GOOD = 70.0
"""Percent, after one epoch: the script has 79 then, and 89 after two."""


@pytest.fixture
def plain(repository: Path) -> Path:
    return repository / "tests" / "wild" / "train.py"


@pytest.fixture
def patched(plain: Path, tmp_path: Path) -> Path:
    script = tmp_path / "train.py"
    script.write_text(apply((plain.parent / "psstore.patch").read_text(), to=plain.read_text()))
    return script


def apply(patch: str, *, to: str) -> str:
    """What `patch` would make of the text. A line of the patch that is not where it says it is fails."""
    before, after = to.splitlines(), list[str]()
    place = 0
    for line in patch.splitlines()[2:]:
        hunk = re.match(r"@@ -(\d+)", line)
        if hunk:
            after += before[place : int(hunk[1]) - 1]
            place = int(hunk[1]) - 1
        elif line.startswith("+"):
            after.append(line[1:])
        else:
            assert before[place] == line[1:], f"line {place + 1} of the script is not {line[1:]!r}"
            after += before[place : place + 1] if line.startswith(" ") else []
            place += 1
    return "\n".join(after + before[place:]) + "\n"


def run(folder: Path, *command: str | Path, launcher: Sequence[str] = ()) -> str:
    done = fork_server.run([sys.executable, *launcher, *map(str, command)], cwd=folder, timeout_s=RUN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def accuracies(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"Accuracy: ([\d.]+)%", output)]


def test_the_script_learns_and_goes_on_with_a_store_from_its_checkpoint(
    plain: Path, patched: Path, tmp_path: Path
) -> None:
    alone = accuracies(run(tmp_path, plain, "--epochs", "1"))
    together = run(tmp_path, patched, "--epochs", "2", "--resume", launcher=ON_STORE)
    assert together.count("resumed at epoch 2") == 2
    again = run(tmp_path, plain, "--epochs", "3", "--resume")
    assert "resumed at epoch 3" in again
    assert len(set(accuracies(together))) == 1, "the workers differ"
    assert accuracies(again)[-1] > accuracies(together)[0] > alone[0] > GOOD


@pytest.mark.long
def test_a_resumed_run_ends_as_one_that_was_never_interrupted(patched: Path, tmp_path: Path) -> None:
    def evaluations(output: str) -> list[str]:
        return [line.partition("] ")[2] for line in output.splitlines() if "Test set" in line]

    quickly = ("--workers", "0")
    straight = run(tmp_path, patched, *quickly, "--epochs", "2", "--checkpoint", "straight.pt", launcher=ON_STORE)
    run(tmp_path, patched, *quickly, "--epochs", "1", launcher=ON_STORE)
    resumed = run(tmp_path, patched, *quickly, "--epochs", "2", "--resume", launcher=ON_STORE)
    assert evaluations(resumed) == evaluations(straight)[-2:]
