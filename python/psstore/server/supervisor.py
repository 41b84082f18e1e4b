"""Starts the shard processes, watches them, and ends them: all of them run, or none.

Each child is bound to us by two pipes: our end of its stdin closes with us, however we die, and its stdout ends
with it, however it dies. Nothing is restarted: a shard's memory is gone with it, and silence about that would be
a wrong answer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

import msgspec

from psstore.config import read_token
from psstore.errors import BadArgument
from psstore.net.address import TcpAddress, is_loopback
from psstore.net.limits import ServerLimits
from psstore.server.listening import Endpoint, bind_shards
from psstore.server.settings import READY, ServerSettings, ShardSettings

EXIT_OK, EXIT_SHARD_DIED, EXIT_NOT_STARTED = 0, 1, 3

START_S = 60.0
"""How long the shards may take to be ready. They take well under a second; this is for a machine on its knees."""

STOP_S = ServerLimits().linger_s + 2.0
"""How long they may take to drain: their connections' time to linger, and a little for the process itself."""

_log = logging.getLogger("psstore.supervisor")


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """What `--ready-fd` is told, as one line of JSON."""

    url: str
    """The address that a client needs: of shard 0."""
    shards: tuple[tuple[str, ...], ...]
    """All addresses of each shard."""
    store: str
    mode: str
    workers: int
    pid: int

    def __str__(self) -> str:
        places = " ".join(_short(addresses) for addresses in self.shards)
        shards = "1 shard" if len(self.shards) == 1 else f"{len(self.shards)} shards"
        workers = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        return f"psstore-server ready: {self.url} ({shards}: {places}; {self.mode}, {workers})"


def _short(addresses: tuple[str, ...]) -> str:
    """'5700', '/run/store' or '/run/store+5700'."""
    return "+".join(a.removeprefix("unix://") if a.startswith("unix") else a.rpartition(":")[2] for a in addresses)


class Signals:
    """While entered, SIGTERM, SIGINT and SIGHUP don't interrupt anything but make `received` readable."""

    NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def __enter__(self) -> Signals:
        self.received, self._sent = socket.socketpair()
        self._sent.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._sent.fileno(), warn_on_full_buffer=False)
        self._handlers_before = {number: signal.signal(number, lambda *_: None) for number in self.NUMBERS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self.received.close()
        self._sent.close()

    def take(self) -> None:
        """Those that have come are seen to: the next ones will be news."""
        self.received.recv(64)


class Child:
    """One shard process."""

    def __init__(self, settings: ShardSettings) -> None:
        self.name = f"shard {settings.index}"
        isolated = ["-P"] if sys.version_info >= (3, 11) else []  # modules in the working directory are none of ours
        self.process = subprocess.Popen(
            [sys.executable, *isolated, "-m", "psstore.server.shard"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=settings.sockets,
            start_new_session=True,  # Ctrl-C is for the supervisor, which asks the shards to drain
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.report = self.process.stdout
        with contextlib.suppress(BrokenPipeError):  # it died already: its report's end will say so
            self.process.stdin.write(msgspec.json.encode(settings) + b"\n")
            self.process.stdin.flush()

    def fate(self) -> str:
        """How it ended, once its report has."""
        status = self.process.wait()
        if status < 0:
            return f"{self.name} was killed by signal {-status} ({signal.Signals(-status).name})"
        return f"{self.name} ended with exit status {status}"


class Supervisor:
    """One run of one store."""

    def __init__(self, settings: ServerSettings, *, serve_tcp: bool) -> None:
        """`serve_tcp`: also where a unix socket is served. Raises BadArgument."""
        settings.check()
        self._settings = settings
        self._token = read_token(Path(settings.token_file)) if settings.token_file else None
        self._tcp = TcpAddress(settings.host, settings.port) if serve_tcp else None
        if self._tcp and self._token is None and not is_loopback(settings.host):
            raise BadArgument(
                f"host {settings.host} can be reached from other machines, so clients need a token:\n"
                "  python -c 'import secrets; print(secrets.token_hex(32))' > token && chmod 600 token\n"
                f"  psstore-server --host {settings.host} --token-file token"
            )
        self._store = secrets.token_hex(8)
        self._children: list[Child] = []

    def run(self, *, out: TextIO, ready_fd: int | None) -> int:
        """Returns the exit status, when nothing of it runs any more. Raises BadArgument if it can't start."""
        settings = self._settings
        endpoints = bind_shards(settings.shards, tcp=self._tcp, uds=settings.uds, advertise=settings.advertise)
        try:
            with Signals() as signals:
                return self._supervise(endpoints, signals, out=out, ready_fd=ready_fd)
        finally:
            for child in self._children:
                child.process.kill()
                child.process.wait()
            for endpoint in endpoints:
                endpoint.close()
                endpoint.remove_files()

    def _supervise(self, endpoints: Sequence[Endpoint], signals: Signals, *, out: TextIO, ready_fd: int | None) -> int:
        with selectors.DefaultSelector() as selector:
            selector.register(signals.received, selectors.EVENT_READ, signals)
            for settings in self._shard_settings(endpoints):
                child = Child(settings)
                self._children.append(child)
                selector.register(child.report, selectors.EVENT_READ, child)
            for endpoint in endpoints:
                endpoint.close()
            dead: list[Child] = []
            if self._await_ready(selector):
                self._announce(endpoints, out=out, ready_fd=ready_fd)
                dead = self._await_end(selector)
            for child in dead:
                _log.error("%s; the store is lost, stopping the other shards", child.fate())
            self._stop(selector)
            return EXIT_SHARD_DIED if dead else EXIT_OK

    # ---- phases: each waits for the children's reports and for signals ----

    def _await_ready(self, selector: selectors.BaseSelector) -> bool:
        """False: a signal came first. Raises BadArgument if a shard can't start."""
        deadline = time.monotonic() + START_S
        waiting = list(self._children)
        while waiting:
            events = selector.select(max(0.0, deadline - time.monotonic()))
            if not events:
                raise BadArgument(f"not ready within {START_S:g} s: {', '.join(child.name for child in waiting)}")
            for key, _ in events:
                if isinstance(key.data, Signals):
                    key.data.take()
                    return False
                self._check_report(key.data)
                waiting.remove(key.data)
        return True

    @staticmethod
    def _check_report(child: Child) -> None:
        report = child.report.readline().decode().strip()
        if report != READY:
            raise BadArgument(report or f"{child.fate()} before it was ready; its messages are above")

    @staticmethod
    def _await_end(selector: selectors.BaseSelector) -> list[Child]:
        """The shards that ended by themselves; none if a signal came first."""
        events = [key.data for key, _ in selector.select()]
        for signals in events:
            if isinstance(signals, Signals):
                signals.take()
        return [child for child in events if isinstance(child, Child)]

    def _stop(self, selector: selectors.BaseSelector) -> None:
        """Asks all to drain. What is left after STOP_S, or at the next signal, is killed by `run`."""
        for child in self._children:
            child.process.terminate()
        deadline = time.monotonic() + STOP_S
        running = list(self._children)
        while running:
            events = [key.data for key, _ in selector.select(max(0.0, deadline - time.monotonic()))]
            if not events or any(isinstance(event, Signals) for event in events):
                _log.warning("killing %s", ", ".join(child.name for child in running))
                return
            for child in events:
                selector.unregister(child.report)
                running.remove(child)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(max(0.0, deadline - time.monotonic()))

    # ---- what the children and the world are told ----

    def _shard_settings(self, endpoints: Sequence[Endpoint]) -> Iterator[ShardSettings]:
        settings = self._settings
        signing_key = secrets.token_bytes(32)
        addresses = _addresses(endpoints)
        for index, endpoint in enumerate(endpoints):
            yield ShardSettings(
                index=index,
                store=self._store,
                signing_key=signing_key,
                token=self._token,
                addresses=addresses,
                sockets=tuple(sock.fileno() for sock in endpoint.sockets),
                consistency=settings.consistency(),
                heartbeat_s=settings.heartbeat_s,
                silence_s=settings.silence_s,
                refuse_non_finite=settings.refuse_non_finite,
                max_connections=settings.max_connections,
                loop=settings.loop,
                log_level=settings.log_level,
                log_format=settings.log_format,
            )

    def _announce(self, endpoints: Sequence[Endpoint], *, out: TextIO, ready_fd: int | None) -> None:
        addresses = _addresses(endpoints)
        ready = Ready(
            url=addresses[0][0],
            shards=addresses,
            store=self._store,
            mode=self._settings.consistency().mode,
            workers=self._settings.workers,
            pid=os.getpid(),
        )
        print(ready, file=out, flush=True)
        if ready_fd is not None:
            with os.fdopen(ready_fd, "wb") as pipe:
                pipe.write(msgspec.json.encode(ready) + b"\n")


def _addresses(endpoints: Sequence[Endpoint]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(str(address) for address in endpoint.addresses) for endpoint in endpoints)
