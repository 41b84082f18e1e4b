"""A process group that ends with its owner, even if the owner is killed.

All children are in one group that a reaper process leads, so that one signal reaches every one of them and
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
from typing import Any

from psstore.launch import reaper


class Child:
    """One process of the group, with pipes for its output."""

    def __init__(self, process: subprocess.Popen[bytes], ended: asyncio.Future[int]) -> None:
        self.process = process
        self.ended = ended
        """Its exit code, or minus the signal that killed it. Done when the process itself is gone, though a child of
        its own may still hold its pipes: that is what asyncio's subprocesses would wait for."""

    def check(self) -> None:
        """Notices if it has ended."""
        code = self.process.poll()
        if code is not None and not self.ended.done():
            self.ended.set_result(code)


class ProcessGroup:
    """An async context manager: on exit, whatever still runs in the group is killed. One per process at a time."""

    def __init__(self) -> None:
        self._reaper: subprocess.Popen[bytes] | None = None
        self._children: list[Child] = []

    async def __aenter__(self) -> ProcessGroup:
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._check_children)
        self._reaper = start_reaper()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leader = self._leader()
        os.killpg(leader.pid, signal.SIGKILL)
        leader.communicate()
        for child in self._children:
            child.process.wait()
            child.check()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)

    def spawn(self, command: Sequence[str], *, environ: Mapping[str, str], pass_fds: Sequence[int] = ()) -> Child:
        """A child in the group. Raises OSError if the command can't be run."""
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environ),
            pass_fds=tuple(pass_fds),
            **in_group(self._leader().pid),
        )
        child = Child(process, asyncio.get_running_loop().create_future())
        self._children.append(child)
        child.check()
        return child

    def _check_children(self) -> None:
        for child in self._children:
            child.check()

    def _leader(self) -> subprocess.Popen[bytes]:
        assert self._reaper is not None, "a ProcessGroup is used as a context manager"
        return self._reaper


def in_group(leader: int) -> dict[str, Any]:
    """What Popen is told so that the process is in that group before it runs; 0: in one of its own.

    Python has `process_group` since 3.11. Before, a function runs between fork and exec, where other threads of this
    process may hold locks for ever; this one needs none.
    """
    if sys.version_info >= (3, 11):
        return {"process_group": leader}
    return {"preexec_fn": partial(os.setpgid, 0, leader)}


def start_reaper() -> subprocess.Popen[bytes]:
    """Starts the process that leads a new group: it does so before it runs, and so before this returns."""
    return subprocess.Popen([sys.executable, "-IS", reaper.__file__], stdin=subprocess.PIPE, **in_group(0))


async def end(children: Sequence[Child], *, grace_s: float) -> None:
    """Asks each to end, and kills those that have not within `grace_s`. Returns when all have ended."""
    running = [child for child in children if not child.ended.done()]
    if not running:
        return
    for child in running:
        child.process.terminate()
    _, stubborn = await asyncio.wait([child.ended for child in running], timeout=grace_s)
    for child in running:
        if child.ended in stubborn:
            child.process.kill()
    await asyncio.wait([child.ended for child in running])
