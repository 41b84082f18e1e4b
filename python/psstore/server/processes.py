"""A shard's process as its supervisor holds it, and the signals that the supervisor gets."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import msgspec

from psstore.checkpoint.interval import CheckpointInterval
from psstore.config import Credentials
from psstore.exit_codes import signal_name
from psstore.server.pipe_words import NOT_WRITTEN
from psstore.server.settings import LogFormat, LogLevel
from psstore.server.shard_settings import ShardSettings


def requests_to_end() -> list[signal.Signals]:
    """The signals that end a store, or a run, in order. Not a terminal's end where `nohup` has had that ignored."""
    numbers = [signal.SIGTERM, signal.SIGINT]
    return numbers if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [*numbers, signal.SIGHUP]


class Signals:
    """While entered, requests to end and news of children don't interrupt anything but make `received` readable."""

    def __enter__(self) -> Signals:
        self.received, self._sent = socket.socketpair()
        self._sent.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._sent.fileno(), warn_on_full_buffer=False)
        self._ends = requests_to_end()
        self._handlers_before = {
            number: signal.signal(number, lambda *_: None) for number in (*self._ends, signal.SIGCHLD)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self.received.close()
        self._sent.close()

    def take(self) -> bool:
        """Whether a request to end was among those that have come; else a child has stopped, goes on, or has ended.
        The next ones will be news."""
        return any(number in self._ends for number in self.received.recv(64))


def _start(module: str, settings: msgspec.Struct, *, files: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
    """A process of ours, bound to this one by two pipes, which is told its settings through the first."""
    isolated = ["-P"] if sys.version_info >= (3, 11) else []  # modules in the working directory are none of ours
    process = subprocess.Popen(
        [sys.executable, *isolated, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=files,
        start_new_session=True,  # Ctrl-C is for the supervisor, which asks the shards to drain
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died already: its report's end will say so
        process.stdin.write(msgspec.json.encode(settings) + b"\n")
        process.stdin.flush()
    return process


LAST_CHECKPOINT = b"last\n"
"""What the process that has checkpoints written is told at the end of a store, but for its settings all that it is."""


class CheckpointDuty(msgspec.Struct, frozen=True, kw_only=True):
    """What the process that has checkpoints written is told."""

    url: str
    """Where the store is."""
    credentials: Credentials
    place: str
    interval: CheckpointInterval
    began_at: int
    """The version with which the store began, which needs no checkpoint."""
    log_level: LogLevel
    log_format: LogFormat


class ReshardDuty(msgspec.Struct, frozen=True, kw_only=True):
    """What the process is told that writes a store down as it stands still."""

    client: str
    """The client id that it connects with, which shards know."""
    url: str
    """Where the store is."""
    credentials: Credentials
    place: str
    log_level: LogLevel
    log_format: LogFormat


class MetricsDuty(msgspec.Struct, frozen=True, kw_only=True):
    """What the process that answers /metrics is told."""

    first: int
    """The first shard that runs here."""
    addresses: tuple[str, ...]
    """Where each shard that runs here is reached from this host."""
    credentials: Credentials
    socket: int
    """Inherited file descriptor of the bound socket to answer at."""
    log_level: LogLevel
    log_format: LogFormat


EXIT_S = 1.0
"""How long a process may take to end whose report has ended."""


class Companion:
    """A process beside the shards, without which they do: it is started again when it ends by itself."""

    def __init__(self, module: str, duty: msgspec.Struct, *, files: tuple[int, ...] = ()) -> None:
        self.began = time.monotonic()
        self._process = _start(module, duty, files=files)
        assert self._process.stdout is not None
        self.report = self._process.stdout
        """Ends with it."""

    def kill(self) -> None:
        """Ends it at once, and lets go of its pipes."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class CheckpointProcess(Companion):
    """The process that has a store's checkpoints written, as often as it is told, and a last one."""

    def __init__(self, duty: CheckpointDuty) -> None:
        super().__init__("psstore.launch.checkpointing", duty)

    def finish(self) -> None:
        """Asks for the last one; then it ends."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(LAST_CHECKPOINT)
            self._process.stdin.close()

    def has_failed(self) -> bool:
        """Whether it has ended otherwise than by itself. REQUIRES: its report has ended."""
        try:
            return self._process.wait(EXIT_S) != 0
        except subprocess.TimeoutExpired:
            return True


class ReshardProcess(Companion):
    """The process that writes a store down as it stands still."""

    def __init__(self, duty: ReshardDuty) -> None:
        super().__init__("psstore.launch.resharding", duty)
        self._begun = b""

    def told(self) -> tuple[str, str] | None:
        """What it has to say, once its report is readable: WRITTEN and the version, or NOT_WRITTEN and why. None: not
        all of that has come."""
        data = os.read(self.report.fileno(), 1 << 16)
        if not data:
            return NOT_WRITTEN, "what writes the store down has ended; its messages are above"
        line, end, _ = (self._begun + data).partition(b"\n")
        if not end:
            self._begun = line
            return None
        what, _, rest = line.decode().partition(" ")
        return what, rest


class MetricsProcess(Companion):
    """The process that answers /metrics, /livez and /readyz."""

    def __init__(self, duty: MetricsDuty) -> None:
        super().__init__("psstore.launch.metrics_server", duty, files=(duty.socket,))


class ShortLives:
    """Whether a companion that ended may be started again: not one that ends at once, again and again."""

    SHORT_S, MOST = 5.0, 4

    def __init__(self) -> None:
        self._num = 0

    def may_start_again(self, ended: Companion) -> bool:
        """To be asked once after each end."""
        is_short = time.monotonic() - ended.began < self.SHORT_S
        self._num = self._num + 1 if is_short else 0
        return self._num < self.MOST


class ShardProcess:
    """One shard process."""

    def __init__(self, settings: ShardSettings) -> None:
        follows = settings.follows
        self.name = f"shard {settings.index}" if follows is None else f"the standby of shard {settings.index}"
        self.client = "" if follows is None else follows.client
        """The client that it is of its shard, as a standby."""
        self.stopped_at: float | None = None
        """Since when it stands still, as far as the system has said."""
        self.process = _start("psstore.server.shard", settings, files=settings.sockets)
        assert self.process.stdout is not None
        self.report = self.process.stdout
        self._begun = b""

    def told(self) -> list[str] | None:
        """The lines that it has reported since, once its report is readable; None: it has ended."""
        data = os.read(self.report.fileno(), 1 << 16)
        if not data:
            return None
        *lines, self._begun = (self._begun + data).split(b"\n")
        return [line.decode() for line in lines]

    def tell(self, line: str) -> None:
        """Says a line to it. One that has died hears nothing."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    def kill(self) -> None:
        """Ends it at once, and lets go of its pipes."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def resident_bytes(self) -> int:
        """Memory that it has; 0 if it has ended."""
        try:
            with open(f"/proc/{self.process.pid}/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):
            return 0

    def pause(self) -> str | None:
        """That it has stopped, or goes on, if that is news: the system tells it once. A process that stands still
        closes no connection and ends no report."""
        try:
            found = os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
        except ChildProcessError:  # it has ended, which is for its report to say
            return None
        if found is None:
            return None
        if found.si_code == os.CLD_CONTINUED:
            self.stopped_at = None
            return f"{self.name} goes on"
        self.stopped_at = time.monotonic()
        by = signal_name(found.si_status)
        return f"{self.name} stands still, stopped by {by}: whoever asks it waits (kill -CONT {self.process.pid})"

    def fate(self) -> str:
        """How it ended, once its report has."""
        status = self.process.wait()
        if status < 0:
            return f"{self.name} was killed by signal {-status} ({signal_name(-status)})"
        return f"{self.name} ended with exit status {status}"
