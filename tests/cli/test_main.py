"""`psstore` as a whole: its commands, and what they load."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import psstore
from psstore.cli.main import app


def test_help_names_every_command() -> None:
    text = CliRunner().invoke(app, ["--help"]).stdout
    for name in ("run", "demo", "plan", "status", "top", "doctor", "kubernetes", "server", "version"):
        assert f" {name} " in text


def test_version_says_which_and_with_what() -> None:
    asked = (["version"], ["--version"], ["version", "-v"])
    plain, flag, verbose = (CliRunner().invoke(app, arguments).stdout for arguments in asked)
    assert plain == flag == f"psstore {psstore.__version__}\n"
    assert verbose.startswith(plain)
    assert "instruction sets" in verbose


def test_server_is_psstore_server_with_its_own_flags_and_exit_status() -> None:
    def both(*flags: str) -> list[tuple[int, str]]:
        starts = (["psstore.cli.main", "server"], ["psstore.cli.server"])
        ran = [
            subprocess.run([sys.executable, "-m", *start, *flags], capture_output=True, text=True) for start in starts
        ]
        return [(one.returncode, one.stdout) for one in ran]

    one, other = both("--print-config", "--shards", "3")
    assert one == other
    assert one[0] == 0
    assert [code for code, _ in both("--shards", "zero")] == [3, 3]


@pytest.mark.parametrize("arguments", [["version"], ["--help"], ["plan", "--shards", "2", "--model", "gpt2"]])
def test_what_the_system_refuses_is_said_in_a_sentence(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "psstore.cli.main", *arguments], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (ran.returncode, ran.stderr) == (1, "psstore: [Errno 28] No space left on device\n")


def test_the_command_line_loads_torch_for_no_command_that_needs_none() -> None:
    program = "import sys; from psstore.cli.main import app; print('torch' in sys.modules, 'numpy' in sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert loaded == "False False\n"
