"""The examples run as their README says, and the lines that change are the ones it lists."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fork_server import run
from tests.support.server_process import StoreProcess

RUN_S = 100.0

MOST_CHANGED_LINES = 10
"""So few that they are worth showing."""


@pytest.fixture
def examples(repository: Path) -> Path:
    return repository / "examples"


def code_of(path: Path) -> list[str]:
    """Without the docstring and empty lines."""
    _, _, code = path.read_text().partition('"""\n')
    return [line for line in code.splitlines() if line]


def accuracies(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"([\d.]+)%", output)]


def run_on_store(script: Path, *arguments: str) -> str:
    command = [
        sys.executable,
        "-m",
        "psstore.cli.main",
        "run",
        "--shards",
        "2",
        "--workers",
        "2",
        str(script),
        *arguments,
    ]
    ran = run(command, timeout_s=RUN_S)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_lines_that_change_are_few_and_are_those_in_the_readme(examples: Path) -> None:
    before, after = code_of(examples / "mnist_local.py"), code_of(examples / "mnist_psstore.py")
    changed = [line for line in difflib.ndiff(before, after) if line[:2] in ("- ", "+ ")]
    listed = re.search(r"```diff\n(.*?)```", (examples / "README.md").read_text(), re.DOTALL)
    assert listed is not None
    assert [line[0] + line[2:] for line in changed] == listed[1].splitlines()
    assert sum(line.startswith("+") for line in changed) <= MOST_CHANGED_LINES


def test_the_local_example_learns(examples: Path) -> None:
    command = [sys.executable, str(examples / "mnist_local.py"), "--epochs", "5"]
    assert accuracies(run(command, timeout_s=RUN_S).stdout)[-1] > 93


def test_the_distributed_example_learns_and_its_workers_agree(examples: Path) -> None:
    found = accuracies(run_on_store(examples / "mnist_psstore.py", "--epochs", "5"))
    assert len(found) == 2
    assert found[0] == found[1] > 93


@pytest.mark.long
def test_learners_share_a_fraction_of_what_they_would_in_every_step(examples: Path) -> None:
    output = run_on_store(examples / "learners.py", "--quick")
    seen = [float(found) for found in re.findall(r"learner saw: loss ([\d.]+)", output)]
    assert len(seen) == 2
    assert len(set(seen)) == 1, "all have the same weights"
    first = [float(found) for found in re.findall(r"step 1: loss ([\d.]+)", output)]
    assert seen[0] < 0.8 * min(first)
    pushed = {int(found) for found in re.findall(r"pushed (\d+)", output)}
    assert pushed == {3390}, "a 75th of the model's 255,744 bytes"


def test_the_transformer_learns_and_its_workers_clip_the_same_norm(examples: Path) -> None:
    found = re.findall(
        r"rank (\d)\] step (\d+): loss ([\d.]+), .* norm ([\d.]+)", run_on_store(examples / "transformer.py", "--quick")
    )
    losses = {rank: [float(loss) for its, _, loss, _ in found if its == rank] for rank in "01"}
    norms = {rank: [norm for its, _, _, norm in found if its == rank] for rank in "01"}
    assert all(one[-1] < 0.7 * one[0] for one in losses.values())
    assert norms["0"] == norms["1"] != []


def test_all_together_learns_and_its_workers_agree(examples: Path) -> None:
    output = run_on_store(examples / "all_together.py", "--quick")
    found = accuracies(output)
    assert len(found) == 2
    assert found[0] == found[1] > 50
    assert len(set(re.findall(r"norm ([\d.]+), scale (\d+)", output))) == 1


@pytest.mark.long
def test_the_recommender_learns_and_its_workers_agree(examples: Path) -> None:
    output = run_on_store(examples / "dlrm.py", "--steps", "200")
    found = {rank: re.findall(rf"rank {rank}\] step \d+: loss [\d.]+, AUC ([\d.]+)", output) for rank in "01"}
    assert found["0"] == found["1"]
    assert float(found["0"][-1]) > 0.7


def test_the_tutorial_learns_and_its_workers_agree(examples: Path) -> None:
    output = run_on_store(examples / "tutorial_kv.py")
    found = accuracies(output)
    assert len(found) == 2
    assert found[0] == found[1] > 88
    assert output.count("version 200") == 2


@pytest.mark.long
def test_workers_of_another_launcher_need_only_the_url(examples: Path) -> None:
    """The variables that torchrun sets, and PSSTORE_URL."""
    with StoreProcess("--shards", "2", "--workers", "2") as store:
        workers = [
            subprocess.Popen(
                [sys.executable, str(examples / "mnist_psstore.py"), "--epochs", "1"],
                env={**os.environ, "PSSTORE_URL": store.ready["url"], "RANK": str(rank), "WORLD_SIZE": "2"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        outputs = [worker.communicate(timeout=RUN_S)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert accuracies(outputs[0]) == accuracies(outputs[1])
