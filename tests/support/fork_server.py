"""A process that has imported what stores run, and forks for each one that is to run: one beside each process that runs
tests, from its first store on until it ends.

The server has one thread, which reads requests from a socket. A request is a `Start`, and with it come the files of the
process, and a pipe through which the server says first its id and, once it has ended, its status.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.support.forked_program import ROOM, Popen, Start, fork, lasting, num_threads

REPOSITORY = Path(__file__).resolve().parents[2]

MOST_BYTES, MOST_FILES = 1 << 17, 32
"""Of a request."""

STORES = (
    *(
        "psstore.cli.server",
        "psstore.server.peer_monitor",
        "psstore.server.shard",
        "asyncio.subprocess",
        "ssl",
        "uvloop",
    ),
    *("psstore.launch.checkpointing", "psstore.launch.metrics_server", "psstore.launch.resharding"),
    *("psstore.cli.main", "psstore.server.other_member"),
)
TRAININGS = (
    *("torch", "torch._dynamo", "psstore.torch", "psstore.cli.run", "psstore.cli.demo.worker"),
    *STORES,
)
IMPORTED = {"stores": STORES, "trainings": TRAININGS}
"""What the programs of each kind import, also as they run, as torch its compiler where an optimizer is made."""

NUMBER = struct.Struct("=i")
"""What the server says of a process: its id, then its exit status as `Popen` has it."""


class ServedPopen(subprocess.Popen[Any]):
    """A process that the fork server forks where it can become what is to be run; a child of this one elsewhere."""

    kind = "stores"
    """Which server's, as IMPORTED names them."""

    _news: Any = None
    """What the server says of the process."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        server = None if _is_elsewhere() or _imports_start_threads() else _server(self.kind)
        start = None if server is None else Start.of(args, rest, server.environ)
        if server is None or start is None:
            return super()._execute_child(args, *rest)  # type: ignore[misc,no-any-return]
        read_fd, write_fd = os.pipe()
        self._news = os.fdopen(read_fd, "rb", buffering=0)
        weakref.finalize(self, self._news.close)  # no sooner: several threads may wait
        files = [place if file == -1 else file for place, file in enumerate(start.files)]
        socket.send_fds(server.control, [pickle.dumps(start)], [write_fd, *files, *start.kept])
        os.close(write_fd)
        self.pid = self._told()
        self._child_created = True
        self._close_pipe_fds(*start.pipes)  # type: ignore[attr-defined]
        return None

    def _told(self) -> int:
        number = self._news.read(NUMBER.size)
        assert number, "the fork server has ended"
        return int(*NUMBER.unpack(number))

    def _ended(self, timeout_s: float | None) -> bool:
        if self.returncode is None:
            told = select.poll()
            told.register(self._news, select.POLLIN)
            if not told.poll(None if timeout_s is None else 1000.0 * max(0.0, timeout_s)):
                return False
            with self._waitpid_lock:  # type: ignore[attr-defined]
                if self.returncode is None:  # no other thread has read it
                    self.returncode = self._told()
        return True

    def _internal_poll(self, *known: Any, **more: Any) -> int | None:
        if self._news is None:
            return super()._internal_poll(*known, **more)  # type: ignore[misc,no-any-return]
        self._ended(0.0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._news is None:
            return super()._wait(timeout)  # type: ignore[misc,no-any-return]
        if not self._ended(timeout):
            assert timeout is not None, "it was waited for"
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode


class TrainingPopen(ServedPopen):
    """A program that imports torch, or starts others that do."""

    kind = "trainings"


def run(
    command: Sequence[str],
    *,
    timeout_s: float,
    cwd: Path | None = None,
    environ: Mapping[str, str] | None = None,
    popen: type[ServedPopen] = TrainingPopen,
) -> subprocess.CompletedProcess[str]:
    """A command until it has ended, with all that it printed. `popen`: what forks it, a training's or a store's."""
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    with popen(command, cwd=cwd, env=environ, stdin=nothing, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _is_elsewhere() -> bool:
    """Whether this thread has a network of its own, which a child of it is to share."""
    return os.readlink("/proc/thread-self/ns/net") != os.readlink("/proc/self/ns/net")


def _imports_start_threads() -> bool:
    """Whether numpy's and torch's libraries start threads as they are imported, which a fork would lack: they do unless
    they are told not to, as pytest's tests tell them, and who runs a program of these folders need not."""
    return os.environ.get("OMP_NUM_THREADS") != "1"


@dataclass(frozen=True)
class Server:
    """The fork server of a kind that this process has."""

    control: socket.socket
    environ: dict[str, str]
    """Lasting variables."""


_asked_first = threading.Lock()


def _server(kind: str) -> Server:
    """The server is started as it is first asked for."""
    with _asked_first:  # by several threads, maybe
        return _start_server(kind)


@functools.cache
def _start_server(kind: str) -> Server:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.support.fork_server", kind, str(theirs.fileno()), ROOM]
    environ = {**os.environ, "PSSTORE_TEST_ROOM": ROOM}
    # Whoever asks first may be a test that has gone to a folder of its own.
    process = Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, cwd=REPOSITORY, env=environ)
    theirs.close()

    def end() -> None:
        ours.shutdown(socket.SHUT_RDWR)  # whoever was forked from here may have it, too
        process.wait()

    atexit.register(end)
    return Server(ours, lasting(os.environ))


class Forks:
    """The processes of this server, and to whom it says what becomes of them."""

    def __init__(self) -> None:
        self._news: dict[int, int] = {}

    def add(self, start: Start, files: list[int]) -> None:
        news, *streams = files
        places = dict(zip((0, 1, 2, *start.kept), streams, strict=True))
        pid = fork(start, places)
        for file in streams:
            os.close(file)
        self._news[pid] = news
        os.write(news, NUMBER.pack(pid))

    def reap(self) -> None:
        while self._news:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            news = self._news.pop(pid)
            with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
                os.write(news, NUMBER.pack(os.waitstatus_to_exitcode(status)))
            os.close(news)


def serve(control: socket.socket, imported: Sequence[str]) -> NoReturn:
    """Until nobody is left who might ask."""
    for name in imported:
        importlib.import_module(name)
    sys.path.pop(0)  # where this one was found, of all places
    assert num_threads() == threading.active_count() == 1, "an import has started threads"
    signal.signal(
        signal.SIGINT, lambda *_: None
    )  # which is for who runs the tests; ignored, it would be so in each fork
    children, woken = socket.socketpair()
    for end in (children, woken):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    forks = Forks()
    while True:
        readable, _, _ = select.select([control, children], [], [])
        if children in readable:
            children.recv(4096)
            forks.reap()
        if control in readable:
            data, files, _, _ = socket.recv_fds(control, MOST_BYTES, MOST_FILES)
            if not data:
                sys.exit()
            forks.add(pickle.loads(data), files)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[2])), IMPORTED[sys.argv[1]])
