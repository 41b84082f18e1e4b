"""A store that notes when its calls begin and end, while somebody wants to know: `psstore trace`, or OpenTelemetry.

For `psstore trace` what is noted goes to a file of this worker's, in a folder that all workers and whoever asks can
see. While the folder has a file WANTED, workers note; they look for it in commits, now and then. For OpenTelemetry it
becomes spans (otel_spans.py). Without PSSTORE_TRACE and PSSTORE_OTEL no such store is made.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar, cast

import msgspec

from psstore.client.operations import Operations
from psstore.client.store import Again, Backend, Store

_log = logging.getLogger("psstore.client")

WANTED = "wanted"

LOOK_S = 0.2
"""Between two looks for it: a folder on a network takes its time to answer."""

F = TypeVar("F", bound=Callable[..., Any])


class CallSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A call from its begin to its end, in nanoseconds since 1970."""

    call: str
    """Name of the store's method."""
    step: int
    """The round whose gradients it pushes or commits, or whose new values it pulls."""
    begin: int
    end: int
    waits: bool = True
    """The caller waited for its end."""


PHASES = {
    "push": "push",
    "push_many": "push",
    "push_rows": "push",
    "settle": "push",
    "publish": "commit",
    "commit": "commit",
    "global_norm": "commit",
    "finish": "commit",
    "pull": "pull",
    "pull_many": "pull",
    "pull_rows": "pull",
}
"""What a call of the store is in a step."""


class Notes(Protocol):
    """Where calls are noted."""

    @property
    def is_on(self) -> bool:
        """Somebody wants them."""

    def look(self) -> None:
        """Looks whether somebody does, now and then."""

    def note(self, span: CallSpan) -> None:
        """Writes a call down, if anybody wants it. Any thread may call it."""

    def end(self) -> None:
        """The store ends, or is connected anew."""


class SpanFile:
    """What one worker notes for `psstore trace`."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._wanted = folder / WANTED
        self._path = path_of(folder, rank)
        self._asked: tuple[int, int] | None = None
        """For whom the file is: somebody else may ask before anybody saw that the one before is done."""
        self._file: IO[bytes] | None = None
        self._look_at = 0.0
        self._has_warned = False

    @property
    def is_on(self) -> bool:
        return self._file is not None

    def look(self) -> None:
        """Begins or ends, as somebody wants. A folder or a file that fails is said once, and the training goes on."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        with self._giving_up():
            asked = who_asks(self._wanted)
            if asked == self._asked:
                return
            self._asked = asked
            self._end()
            if asked is not None:
                self._file = self._path.open("wb", buffering=0)

    def end(self) -> None:
        """Does nothing: whoever has asked reads what there is."""

    def note(self, span: CallSpan) -> None:
        if self._file is not None:
            with self._giving_up():
                self._file.write(msgspec.json.encode(span) + b"\n")

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """In the block, a failure ends what is noted for whoever asks now."""
        try:
            yield
        except OSError as error:
            with suppress(OSError):
                self._end()
            if not self._has_warned:
                self._has_warned = True
                _log.warning("this worker notes no calls for psstore trace: %s", error)

    def _end(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def who_asks(wanted: Path) -> tuple[int, int] | None:
    """Says who made that file last, or touched it; None: there is none."""
    try:
        there = wanted.stat()
    except FileNotFoundError:
        return None
    return there.st_ino, there.st_mtime_ns


def path_of(folder: Path, rank: int) -> Path:
    """Where a worker notes."""
    return folder / f"rank-{rank}.jsonl"


def _noted(method: F, *, of_last_round: bool = False, commits: bool = False) -> F:
    """The method, noted. `of_last_round`: it is about the round that was committed last, or is committed early.
    `commits`: it commits one."""

    @functools.wraps(method)
    def call(self: TracedStore, /, *args: Any, **kwargs: Any) -> Any:
        if commits:
            self.look()
            self.steps_on_this_thread()
        if not self.is_noted:
            return method(self, *args, **kwargs)
        step, begin, waits = self.step(of_last_round), time.time_ns(), self.is_waited_for
        result = method(self, *args, **kwargs)
        self.note(CallSpan(call=method.__name__, step=step, begin=begin, end=time.time_ns(), waits=waits))
        return result

    return cast(F, call)


def _noted_start(
    method: F, call_name: str, *, of_last_round: bool = False, commits: bool = False, waits: bool = False
) -> F:
    """The method that starts a call, which is noted when that is over. `waits`: nothing is left to do meanwhile."""

    @functools.wraps(method)
    def call(self: TracedStore, /, *args: Any, **kwargs: Any) -> Any:
        if commits:
            self.look()
        if waits:
            self.steps_on_this_thread()
        if not self.is_noted:
            return method(self, *args, **kwargs)
        step, begin = self.step(of_last_round), time.time_ns()

        def over(_: Future[Any]) -> None:
            self.note(CallSpan(call=call_name, step=step, begin=begin, end=time.time_ns(), waits=waits))

        started = method(self, *args, **kwargs)
        started.add_done_callback(over)
        return started

    return cast(F, call)


class TracedStore(Store):
    """A worker's store under PSSTORE_TRACE or PSSTORE_OTEL."""

    def __init__(
        self, operations: Operations, backend: Backend, url: str, again: Again | None = None, *, notes: Sequence[Notes]
    ) -> None:
        super().__init__(operations, backend, url, again)
        self._notes = notes
        self._steps_on: int | None = None
        """The thread that ends rounds: calls of others, as those that prefetch rows, are waited for by nobody."""

    @property
    def is_noted(self) -> bool:
        """Somebody wants to know of its calls."""
        return any(notes.is_on for notes in self._notes)

    @property
    def is_waited_for(self) -> bool:
        """Whether the training waits for a call of this thread."""
        return self._steps_on in (None, threading.get_ident())

    def steps_on_this_thread(self) -> None:
        """Notes that the training's steps end here."""
        self._steps_on = threading.get_ident()

    def step(self, of_last_round: bool) -> int:
        """The step that a call is about that begins now."""
        return self.round - (of_last_round and not self._operations.client.worker.is_promised)

    def look(self) -> None:
        """Looks whether somebody does."""
        for notes in self._notes:
            notes.look()

    def note(self, span: CallSpan) -> None:
        """Writes a call down for all who want it."""
        for notes in self._notes:
            notes.note(span)

    def end(self, *, leave: bool) -> None:
        super().end(leave=leave)
        for notes in self._notes:
            notes.end()

    push = _noted(Store.push)
    push_many = _noted(Store.push_many)
    push_rows = _noted(Store.push_rows)
    publish = _noted(Store.publish, commits=True)
    settle = _noted(Store.settle)
    commit = _noted(Store.commit, commits=True)
    global_norm = _noted(Store.global_norm, of_last_round=True)
    finish = _noted(Store.finish, of_last_round=True)
    pull = _noted(Store.pull, of_last_round=True)
    pull_many = _noted(Store.pull_many, of_last_round=True)
    pull_rows = _noted(Store.pull_rows, of_last_round=True)

    start_push_many = _noted_start(Store.start_push_many, "push_many")
    start_push_rows = _noted_start(Store.start_push_rows, "push_rows")
    start_commit = _noted_start(Store.start_commit, "commit", commits=True)
    start_finish = _noted_start(Store.start_finish, "finish", of_last_round=True, waits=True)
    start_pull_many = _noted_start(Store.start_pull_many, "pull_many", of_last_round=True)
