"""Programs that have just begun. Ctrl-C ends them at once, with the status that they would end with later, and nothing
is said; and files that they were begun without are there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

INTERRUPTED_AT = """
import os, signal, sys

class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupter())
sys.argv = {arguments!r}
from psstore.cli.entry import {program}
{program}()
"""


def interrupted(program: str, arguments: list[str], module: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a program that gets SIGINT when it is about to import the module."""
    code = INTERRUPTED_AT.format(module=module, program=program, arguments=[program, *arguments])
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    return ran.returncode, ran.stdout, ran.stderr


@pytest.mark.parametrize(
    "module", ["psstore.cli.main", "typer", "psstore.cli.run_task", "psstore.launch.job", "psstore.launch.reaper"]
)
def test_run_that_is_interrupted_before_anything_runs_ends_quietly(module: str) -> None:
    assert interrupted("psstore", ["run", "--workers", "1", __file__], module) == (130, "", "")


@pytest.mark.parametrize("module", ["psstore.cli.server", "msgspec", "psstore.server.supervisor"])
def test_server_that_is_interrupted_before_anything_runs_ends_quietly(module: str) -> None:
    assert interrupted("server", ["--port", "0"], module) == (0, "", "")


def test_program_that_ignores_interrupts_goes_on() -> None:
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + INTERRUPTED_AT.format(
        module="typer", program="psstore", arguments=["psstore", "version"]
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")


# ---- files that are closed ----


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_programs_start_without_standard_files(closed: str, tmp_path: Path) -> None:
    """What a program opened first would take the number of such a file."""
    program = "from psstore.cli.entry import psstore; psstore()"
    command = f"'{sys.executable}' -c '{program}' version {closed}; echo $? > '{tmp_path / 'status'}'"
    subprocess.run(["sh", "-c", command], timeout=60, check=True, capture_output=True)
    assert (tmp_path / "status").read_text() == "0\n"
