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
from typing import Any, NoReturn

from tests.support.forked_program import MODULES, ROOM, Popen, Start, become, num_threads

MOST_BYTES, MOST_FILES = 1 << 17, 32
"""Of a request."""

IMPORTED = (*MODULES, "asyncio.subprocess", "ssl", "uvloop", "psstore.server.peer_monitor")
"""The programs, and what they import as they run."""


NUMBER = struct.Struct("=i")
"""What the server says of a process: its id, then its exit status as `Popen` has it."""


class ServedPopen(subprocess.Popen[Any]):
    """A process that the fork server forks where it can become what is to be run; a child of this one elsewhere."""

    _news: Any = None
    """What the server says of the process."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        start = Start.of(args, rest)
        if start is None or _is_elsewhere():
            return super()._execute_child(args, *rest)  # type: ignore[misc,no-any-return]
        read_fd, write_fd = os.pipe()
        self._news = os.fdopen(read_fd, "rb", buffering=0)
        env = dict(os.environ) if start.env is None else start.env
        start = Start(start.program, start.cwd or os.getcwd(), env, start.kept, start.pipes, start.is_session)
        files = [place if file == -1 else file for place, file in enumerate(start.files)]
        socket.send_fds(_server(), [pickle.dumps(start)], [write_fd, *files, *start.kept])
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
        with self._waitpid_lock:  # type: ignore[attr-defined]
            if self.returncode is None and select.select([self._news], [], [], timeout_s)[0]:
                self.returncode = self._told()
                self._news.close()
        return self.returncode is not None

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


def _is_elsewhere() -> bool:
    """Whether this thread has a network of its own, which a child of it is to share."""
    return os.readlink("/proc/thread-self/ns/net") != os.readlink("/proc/self/ns/net")


_asked_first = threading.Lock()


def _server() -> socket.socket:
    """Where this process' fork server is asked, which is started at first."""
    with _asked_first:  # by several threads, maybe
        return _start_server()


@functools.cache
def _start_server() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.support.fork_server", str(theirs.fileno()), ROOM]
    process = Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()

    def end() -> None:
        ours.shutdown(socket.SHUT_RDWR)  # whoever was forked from here may have it, too
        process.wait()

    atexit.register(end)
    return ours


class Forks:
    """The processes of this server, and to whom it says what becomes of them."""

    def __init__(self) -> None:
        self._news: dict[int, int] = {}

    def add(self, start: Start, files: list[int]) -> None:
        news, *streams = files
        places = dict(zip((0, 1, 2, *start.kept), streams, strict=True))
        if not (pid := os.fork()):
            become(start, places)
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


def serve(control: socket.socket) -> NoReturn:
    """Until nobody is left who might ask."""
    for name in IMPORTED:
        importlib.import_module(name)
    for name in MODULES:  # which will be run as __main__
        del sys.modules[name]
    sys.path.pop(0)  # where this one was found, of all places
    assert num_threads() == threading.active_count() == 1, "a library that was imported has started threads"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
    serve(socket.socket(fileno=int(sys.argv[1])))
