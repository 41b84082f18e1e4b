"""`psstore demo --crash`: what was killed goes on to the same bytes, what can't is refused, nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from psstore.cli.demo import crash, data, training
from psstore.cli.demo.display import crash_hashes
from psstore.cli.demo.messages import CrashReport, Settings
from psstore.cli.demo.weights import save, sha256_of
from psstore.cli.demo.worker import Batches, cosine, plain_optimizer, seeded_model
from psstore.cli.main import app
from psstore.types import Consistency
from tests.cli.test_demo import DEMO_S, demo, train_nothing
from tests.support.fork_server import TrainingPopen

pytestmark = pytest.mark.timeout(2 * DEMO_S)

REPORT = CrashReport(
    killed_at=12, num_killed=6, went_on_from=10, shards_before=2, shards_after=3,
    sha256_uninterrupted="a" * 64, sha256_went_on="b" * 64,
)  # fmt: skip


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the programs that a test starts have their temporary folders."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def left_behind(temporary: Path) -> list[Path]:
    return [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]


@pytest.mark.parametrize(("shards", "workers"), [(2, 2), pytest.param(1, 1, marks=pytest.mark.long)])
def test_what_was_killed_ends_with_the_bytes_of_what_was_not(shards: int, workers: int, temporary: Path) -> None:
    found = demo("--crash", "--compare", "--shards", str(shards), "--workers", str(workers), "--epochs", "3")
    crashed, rounds = found["crash"], 3 * (1438 // workers // (64 // workers))
    assert crashed["sha256_went_on"] == crashed["sha256_uninterrupted"]
    assert len(crashed["sha256_went_on"]) == 64
    assert found["max_abs_weight_diff"] == 0.0  # to plain PyTorch's
    assert rounds // 3 <= crashed["went_on_from"] <= crashed["killed_at"] <= 3 * rounds // 4
    assert crashed["killed_at"] >= rounds // 2
    assert (crashed["shards_before"], crashed["shards_after"]) == (shards, shards + 1)
    assert crashed["num_killed"] == 1 + shards + 1 + workers  # the supervisor, shards, who has checkpoints written
    assert left_behind(temporary) == []


@pytest.mark.parametrize("when", ["again, with checkpoints", pytest.param("killed with", marks=pytest.mark.long)])
def test_an_interrupt_leaves_nothing_behind(when: str, temporary: Path) -> None:
    """Processes neither, for which conftest.py looks."""
    arguments = ["demo", "--crash", "--json", "--epochs", "8"]
    with TrainingPopen(
        [sys.executable, "-m", "psstore.cli.main", *arguments], stderr=subprocess.PIPE, text=True
    ) as command:
        assert command.stderr is not None
        assert any(when in line for line in command.stderr), "it ended before"
        assert any(line.startswith("epoch ") for line in command.stderr), "it ended before its workers trained"
        command.send_signal(signal.SIGINT)
        assert "interrupted by SIGINT" in command.stderr.read()
        assert command.wait(DEMO_S) == 128 + signal.SIGINT
    assert left_behind(temporary) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--strategy", "average"], "own state dies with them"),
        (["--strategy", "allreduce"], "own state dies with them"),
        (["--mode", "ssp"], "no two trainings end with the same bytes"),
        (["--compression", "int8"], "what it keeps back is in workers"),
    ],
)
def test_what_can_not_end_with_the_same_bytes_is_refused_before_anything_starts(
    arguments: list[str], words: str
) -> None:
    result = CliRunner().invoke(app, ["demo", "--crash", *arguments])
    assert result.exit_code == 2
    assert words in result.stderr


def test_a_training_without_a_middle_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(num_workers=1, epochs=1, weights_path=str(tmp_path / "weights.npz"))
    with pytest.raises(typer.Exit):
        crash.train_and_crash(Console(), settings, rounds=7, num_shards=1, consistency=Consistency())
    assert "7 steps, too few" in capsys.readouterr().err


def test_other_bytes_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def crashed(*_: object, **__: object) -> CrashReport:
        return REPORT

    monkeypatch.setattr(training, "train", train_nothing)
    monkeypatch.setattr(crash, "train_and_crash", crashed)
    result = CliRunner().invoke(app, ["demo", "--crash"])
    assert result.exit_code == 1
    assert "has ended with other bytes" in result.stderr
    assert "different" in result.stdout
    assert [line.split()[-1] for line in result.stdout.splitlines()[-2:]] == ["a" * 64, "b" * 64]


def test_hashes_are_one_under_the_other_on_eighty_columns() -> None:
    first, second = crash_hashes(REPORT).splitlines()[1:]
    assert first.index("a" * 64) == second.index("b" * 64)
    assert len(first) <= 80


def test_only_processes_of_the_run_are_killed(tmp_path: Path) -> None:
    """Those in sessions of their own, too."""
    environ = {**os.environ, "PSSTORE_CHECKPOINT": str(tmp_path / "run")}
    other = {**environ, "PSSTORE_CHECKPOINT": str(tmp_path / "run2")}
    ours = [subprocess.Popen(["sleep", "600"], env=environ, start_new_session=apart) for apart in (False, True)]
    others = subprocess.Popen(["sleep", "600"], env=other)
    try:
        assert crash.kill_all(environ) == 2
        assert [one.wait(60) for one in ours] == [-signal.SIGKILL] * 2
        assert others.poll() is None
    finally:
        for one in (*ours, others):
            one.kill()
            one.wait()


# ---- how a worker goes on ----


@pytest.fixture(scope="module")
def digits() -> data.Digits:
    return data.load(None)


@pytest.mark.parametrize("done", [0, 7, 22, 50])
def test_batches_go_on_where_they_were(digits: data.Digits, done: int) -> None:
    marked = digits._replace(train_labels=torch.arange(len(digits.train_labels)))
    batches = Batches(marked, Settings(num_workers=2, epochs=3), rank=1)
    whole = [labels for number in range(3) for _, labels in batches.epoch(number)]
    rest = [labels for _, labels in islice(batches.after(done), len(whole) - done)]
    assert torch.equal(torch.cat(rest), torch.cat(whole[done:]))


def test_learning_rates_go_on_where_they_were(digits: data.Digits) -> None:
    def rates(done: int) -> list[Any]:
        optimizer = plain_optimizer(seeded_model(digits, 0), Settings(num_workers=1, epochs=1))
        schedule, found = cosine(optimizer, 22, done=done), []
        for _ in range(done, 22):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return found

    assert rates(9) == rates(0)[9:]


def test_what_is_hashed_is_weights_and_momentum(digits: data.Digits, tmp_path: Path) -> None:
    settings = Settings(num_workers=1, epochs=1)
    model = seeded_model(digits, 0)
    optimizer = plain_optimizer(model, settings)
    model(digits.test_images[:4]).sum().backward()
    optimizer.step()
    found = []
    for change in (False, True):
        if change:
            next(iter(optimizer.state.values()))["momentum_buffer"].view(-1)[0] += 1
        save(model, optimizer, str(tmp_path / "weights.npz"))
        found.append(sha256_of(tmp_path / "weights.npz"))
    assert found[0] != found[1]
