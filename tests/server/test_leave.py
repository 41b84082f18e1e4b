"""What a process that leaves still does."""

from __future__ import annotations

import os
import subprocess
import sys

LEAVES = """
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from psstore.server.leave import leave

class NeverTakenApart:
    def __del__(self): print("taken apart")

held, may_end = NeverTakenApart(), Event()
ThreadPoolExecutor().submit(lambda: may_end.wait() and print("a thread's word"))
print("the last word")
may_end.set()
leave(5)
"""


def test_what_was_begun_and_printed_goes_out_and_nothing_is_taken_apart() -> None:
    left = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=60)
    assert (left.returncode, set(left.stdout.splitlines())) == (5, {"the last word", "a thread's word"}), left.stderr


def test_what_can_not_go_out_is_said_by_the_status() -> None:
    program = "import sys; from psstore.server.leave import leave; sys.stdout.write('lost'); leave(0)"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        left = subprocess.run(
            [sys.executable, "-c", program], env=environ, stdout=full, stderr=subprocess.PIPE, timeout=60
        )
    assert left.returncode == 120, left.stderr
