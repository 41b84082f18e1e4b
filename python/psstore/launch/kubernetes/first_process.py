"""A container's first process, for a program that was not written to be one.

The kernel keeps from a first process the signals that it has no handler for: a script would not notice SIGTERM, and be
killed when its pod's grace is over. And a pod that is evicted has succeeded if its program ends with 0, as a session
does that was told to leave: its Job would put no other pod in its place.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from types import FrameType

from psstore.exit_codes import EXIT_SIGNAL

ENDING = (signal.SIGTERM, signal.SIGINT)


def run(command: Sequence[str]) -> int:
    """Its exit code; 128 and the signal's number if it was told to end, whatever it ended with. Raises OSError if it
    can't be started."""
    told: list[int] = []
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # until there is somebody to tell
    program = subprocess.Popen(command, preexec_fn=_unblock)

    def tell(number: int, _: FrameType | None) -> None:
        told.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(program.pid, number)  # `send_signal` would take its status, which `_wait_for` waits for

    for number in ENDING:
        signal.signal(number, tell)
    _unblock()
    code = _wait_for(program.pid)
    program.returncode = code
    if told:
        return EXIT_SIGNAL + told[0]
    return code if code >= 0 else EXIT_SIGNAL - code


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def _wait_for(pid: int) -> int:
    """A first process is whom orphans are left to, too."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            return os.waitstatus_to_exitcode(status)
