"""A process group that ends with its owner, even if the owner is killed.

All children are in one group that a guard process leads, so that one signal reaches every one of them and
whatever they started. The group is in the background of the terminal: Ctrl-C reaches the owner alone, which
then ends its children in order.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType

from psstore.launch import guard


class ProcessGroup:
    """A context manager: on exit, whatever still runs in the group is killed."""

    def __init__(self) -> None:
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ProcessGroup:
        self._guard = subprocess.Popen(
            [sys.executable, "-IS", guard.__file__], stdin=subprocess.PIPE, preexec_fn=os.setpgrp
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leader = self._leader()
        os.killpg(leader.pid, signal.SIGKILL)
        leader.communicate()

    async def spawn(
        self, command: Sequence[str], *, environ: Mapping[str, str], pass_fds: Sequence[int] = ()
    ) -> asyncio.subprocess.Process:
        """A child in the group, with pipes for its output. Raises OSError if the command can't be run.

        `preexec_fn` and not `process_group`, which Python has only since 3.11; setpgid is safe after a fork.
        """
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(environ),
            pass_fds=tuple(pass_fds),
            preexec_fn=partial(os.setpgid, 0, self._leader().pid),
        )

    def _leader(self) -> subprocess.Popen[bytes]:
        assert self._guard is not None, "a ProcessGroup is used as a context manager"
        return self._guard


async def end(processes: Sequence[asyncio.subprocess.Process], *, grace_s: float) -> None:
    """Asks each to end, and kills those that have not within `grace_s`. Returns when all have ended."""
    running = [process for process in processes if process.returncode is None]
    if not running:
        return
    for process in running:
        process.terminate()
    waits = [asyncio.ensure_future(process.wait()) for process in running]
    await asyncio.wait(waits, timeout=grace_s)
    for process in running:
        if process.returncode is None:
            process.kill()
    await asyncio.wait(waits)
