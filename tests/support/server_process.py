"""`psstore-server` as a process under test: started, waited for, ended, and asked what it wrote."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil

from tests.support.fork_server import ServedPopen, run

START_S = 60.0
END_S = 30.0
"""How long a start and an end may take on a machine that does much else."""

POLL_S = 0.02


def reshard_command(url: str, num_shards: int) -> list[str]:
    """What somebody types to have a store go on with so many shards."""
    return [sys.executable, "-m", "psstore.cli.main", "reshard", url, "--shards", str(num_shards)]


def reshard(
    url: str, num_shards: int, *, timeout_s: float, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """That command until it has ended, with all that it printed."""
    whole = {**os.environ, **(environ or {})}
    return run(reshard_command(url, num_shards), timeout_s=timeout_s, environ=whole, popen=ServedPopen)


class StoreProcess:
    """One run of `psstore-server`. `with StoreProcess("--shards", "2") as store:` is a store that is ready."""

    def __init__(self, *flags: str, port: int | None = 0, environ: Mapping[str, str] | None = None) -> None:
        """`port`: None leaves the flag out."""
        read_fd, write_fd = os.pipe()
        self._ready_pipe = os.fdopen(read_fd, "rb")
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 (lives as long as this object; `end` closes it)
        ports = () if port is None else ("--port", str(port))
        self.process: subprocess.Popen[str] = ServedPopen(
            [sys.executable, "-m", "psstore.cli.server", *ports, *flags, "--ready-fd", str(write_fd)],
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            pass_fds=[write_fd],
            env={**os.environ, **(environ or {})},
            text=True,
        )
        os.close(write_fd)
        self.ready: dict[str, Any] = {}

    def __enter__(self) -> StoreProcess:
        if not self.wait_ready():
            status = self.wait()
            raise AssertionError(f"the server ended with status {status} before it was ready:\n{self.log()}")
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def wait_ready(self) -> bool:
        """False if it ended instead."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._ready_pipe, selectors.EVENT_READ)
            assert selector.select(START_S), f"not ready within {START_S} s:\n{self.log()}"
        line = self._ready_pipe.readline()
        self.ready = json.loads(line) if line else {}
        return bool(line)

    @property
    def url(self) -> str:
        return str(self.ready["url"])

    @property
    def addresses(self) -> list[str]:
        """The first address of each shard."""
        return [shard[0] for shard in self.ready["shards"]]

    def shards(self) -> list[psutil.Process]:
        """The shard processes, in no order."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def shard_pids(self) -> list[int]:
        """Of the shard processes, in the order of the shards."""
        # The last word is the oldest's: who is being started has its parent's sockets until it runs a program.
        newest_first = sorted(self.shards(), key=psutil.Process.create_time, reverse=True)
        places = {str(place): shard.pid for shard in newest_first for place in _listens_at(shard)}
        ends = [address.removeprefix("unix://").rsplit(":", 1)[-1] for address in self.addresses]
        return [places[end] for end in ends]

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """The shards stand still in the block, as if their machine were busy with something else."""
        shards = self.shards()
        for shard in shards:
            shard.suspend()
        try:
            yield
        finally:
            for shard in shards:
                shard.resume()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """Its exit status."""
        return self.process.wait(END_S)

    def stop(self) -> int:
        """Asks it to drain; returns its exit status."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def log(self) -> str:
        """What it and its shards wrote to stderr."""
        file = self._stderr.fileno()  # read in place: the server writes at the position that a seek would move
        return os.pread(file, os.fstat(file).st_size, 0).decode()

    def output(self) -> str:
        """What it wrote to stdout; it has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.read()

    def end(self) -> None:
        """Whatever state it is in: gone."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for pipe in (self._ready_pipe, self.process.stdout, self._stderr):
            if pipe is not None:
                pipe.close()


def _listens_at(shard: psutil.Process) -> list[int | str]:
    """TCP ports and paths; none of one that has ended since, as what writes checkpoints may in between."""
    with contextlib.suppress(psutil.NoSuchProcess):
        tcp = [one.laddr.port for one in shard.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        return [*tcp, *(str(one.laddr) for one in shard.net_connections("unix") if one.laddr and not one.raddr)]
    return []


def failed_start(*flags: str, port: int | None = 0, environ: Mapping[str, str] | None = None) -> tuple[int, str]:
    """(exit status, stderr) of a server that is not to start."""
    server = StoreProcess(*flags, port=port, environ=environ)
    try:
        assert not server.wait_ready(), "it started"
        return server.wait(), server.log()
    finally:
        server.end()


def eventually(holds: Callable[[], bool], timeout_s: float = END_S) -> bool:
    """Whether it came true in time. For what has no event to wait on: processes of others, counters."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
