"""`psstore demo --chaos`: whatever is killed, it ends with the bytes of the quiet run; what can't is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from psstore.cli.demo import chaos, training
from psstore.cli.demo.display import chaos_hashes
from psstore.cli.demo.messages import ChaosReport
from psstore.cli.main import app
from tests.cli.test_demo import DEMO_S, demo, train_nothing
from tests.support.fork_server import run

pytestmark = pytest.mark.timeout(2 * DEMO_S)

REPORT = ChaosReport(
    killed=("leader of shard 1", "a standby", "worker 0", "worker 1"), longest_wait_s=2.5,
    sha256_undisturbed="a" * 64, sha256_disturbed="b" * 64,
)  # fmt: skip


def test_what_is_killed_all_the_time_ends_with_the_bytes_of_the_quiet_run() -> None:
    found = demo("--chaos", "--epochs", "8")["chaos"]
    assert found["sha256_disturbed"] == found["sha256_undisturbed"]
    assert len(found["sha256_disturbed"]) == 64
    assert found["killed"]
    assert found["longest_wait_s"] > 0


PATIENT = f"""
from psstore.cli.demo import chaos
from psstore.cli.main import main

chaos.KILL_EVERY_S = {DEMO_S}
main()
"""
"""`psstore`, whose demo kills nothing while it lasts."""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--strategy", "average"], "own state dies with them"),
        (["--mode", "async"], "no two trainings end with the same bytes"),
        (["--compression", "int8"], "what it keeps back is in workers"),
    ],
)
def test_what_can_not_end_with_the_same_bytes_is_refused_before_anything_starts(
    arguments: list[str], words: str
) -> None:
    result = CliRunner().invoke(app, ["demo", "--chaos", *arguments])
    assert result.exit_code == 2
    assert result.stderr.startswith("psstore: --chaos")
    assert words in result.stderr


def test_a_training_in_which_nothing_was_killed_proves_nothing(tmp_path: Path) -> None:
    """In a program of its own, of which its workers can be forked."""
    program = tmp_path / "patient.py"
    program.write_text(PATIENT)
    command = [sys.executable, str(program), "demo", "--chaos", "--epochs", "1", "--workers", "1", "--shards", "1"]
    ended = run(command, timeout_s=DEMO_S)
    assert ended.returncode == 1
    assert "before anything was killed: ask for more --epochs" in ended.stderr


def test_other_bytes_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def disturbed(*_: object, **__: object) -> ChaosReport:
        return REPORT

    monkeypatch.setattr(training, "train", train_nothing)
    monkeypatch.setattr(chaos, "train_through_chaos", disturbed)
    result = CliRunner().invoke(app, ["demo", "--chaos"])
    assert result.exit_code == 1
    assert "has ended with other bytes" in result.stderr
    assert [line.split()[-1] for line in result.stdout.splitlines()[-2:]] == ["a" * 64, "b" * 64]


def test_kills_are_counted_by_kind_above_the_hashes() -> None:
    first, *rest = chaos_hashes(REPORT).splitlines()
    assert first == "killed 1 leader, 1 standby, 2 workers; the longest time without a step was 2.5 s"
    assert "different" in rest[0]
    assert len(rest[1]) <= 80
