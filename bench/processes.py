"""Processes that a bench starts: a function's, or a store's. They end with the block that started them."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

FRESH = multiprocessing.get_context("forkserver")
"""Processes inherit nothing of the bench's, neither threads nor sockets; what was `preload`ed they have already."""

PATIENCE_S = 10.0
"""For a process to end by itself."""


OPTIMIZERS = "torch._dynamo"
"""What torch imports when the first optimizer is made: 0.9 s of processor time of each process that makes one."""


def preload(*modules: str) -> None:
    """Has them imported once for all processes that are started from now on, and not by each. Call it first."""
    FRESH.set_forkserver_preload(list(modules))


@contextlib.contextmanager
def child(function: Callable[..., None], *arguments: object) -> Iterator[None]:
    """Runs a module's function in a process of its own, which is to end when its work does."""
    process = FRESH.Process(target=function, args=arguments, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.join(PATIENCE_S)
        process.terminate()
        process.join()


@contextlib.contextmanager
def store_server(transport: str, shards: int, *, workers: int = 1, options: Sequence[str] = ()) -> Iterator[str]:
    """The URL of a store in processes of its own. `options`: more of psstore-server's. Raises RuntimeError if it does
    not start; why not, it has written to stderr."""
    with tempfile.TemporaryDirectory() as folder:
        where = ["--port", "0"] if transport == "tcp" else ["--uds", str(Path(folder) / "store")]
        read_fd, write_fd = os.pipe()
        command = [sys.executable, "-m", "psstore.cli.server", "--shards", str(shards), "--workers", str(workers)]
        process = subprocess.Popen(
            [*command, *where, *options, "--ready-fd", str(write_fd), "--log-level", "warning"],
            pass_fds=[write_fd],
            stdout=subprocess.DEVNULL,
        )
        os.close(write_fd)
        try:
            with os.fdopen(read_fd) as ready:
                line = ready.readline()
            if not line:
                raise RuntimeError(f"psstore-server did not start: {shlex.join(command)}, exit code {process.wait()}")
            yield json.loads(line)["url"]
        finally:
            process.terminate()
            process.wait()


def take_what_is_left(process: int) -> None:
    """Has all threads of that process, and what they start from now on, run only where nobody else wants a processor,
    and be interrupted by whoever does (sched(7), SCHED_IDLE): it stands in for one on a host of its own, as far as
    processors go. At nice 19 it would have its slice of a few milliseconds first. Something has to be left to it every
    second: else its connections are given up."""
    for thread in Path(f"/proc/{process}/task").iterdir():
        os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))


def free_port() -> int:
    """One that nobody listens at now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """To those of them that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
