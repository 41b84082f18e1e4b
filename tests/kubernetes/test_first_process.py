"""`psstore kubernetes worker`, as a container's first process: what it tells its program, and what it ends with."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kubernetes.node import why_not
from tests.support.server_process import eventually

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

WORKER = [sys.executable, "-m", "psstore.cli.main", "kubernetes", "worker", "--"]

READY = "print('ready', flush=True)\n"


def started(script: str) -> subprocess.Popen[str]:
    """In a process namespace of its own, which it is the first of; `script` has begun."""
    contained = ["unshare", "--pid", "--fork", "--kill-child", *WORKER, sys.executable, "-c", script]
    process = subprocess.Popen(contained, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def tell(process: subprocess.Popen[str], number: signal.Signals) -> None:
    (first,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(first), number)


def ended(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    process.stdout.close()
    return process.wait(30)


def test_a_program_that_handles_no_signal_ends_by_one() -> None:
    process = started(READY + "import time; time.sleep(60)")
    tell(process, signal.SIGTERM)
    assert ended(process) == 128 + signal.SIGTERM


def test_a_program_that_was_told_to_end_has_not_succeeded_whatever_it_says() -> None:
    waits = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n" + READY + "signal.pause()"
    process = started(waits)
    tell(process, signal.SIGTERM)
    assert ended(process) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("script", "code"),
    [("", 0), ("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 128 + 9)],
)
def test_a_program_that_ends_by_itself_has_its_own_exit_code(script: str, code: int) -> None:
    assert ended(started(READY + script)) == code


def test_orphans_are_not_left_as_zombies() -> None:
    orphan = shutil.which("true")
    leaves = (
        f"import os, subprocess\nif os.fork() == 0:\n    subprocess.Popen([{orphan!r}])\n    os._exit(0)\nos.wait()\n"
    )
    process = started(leaves + READY + "import time; time.sleep(60)")
    (first,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    children = Path(f"/proc/{first}/task/{first}/children")
    assert eventually(lambda: len(children.read_text().split()) == 1), "its program is all that is left"
    tell(process, signal.SIGTERM)
    ended(process)


def test_a_program_that_is_not_there_is_named() -> None:
    run = subprocess.run([*WORKER, "no-such-program"], capture_output=True, text=True, timeout=60)
    assert (run.returncode, "no-such-program: No such file" in run.stderr) == (127, True)
