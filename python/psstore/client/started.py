"""A call that was started, without a task for it: whoever takes its last answer ends it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any, TypeVar, cast

from psstore.client.loop_thread import LoopThread
from psstore.errors import StoreClosed

T = TypeVar("T")

_becoming_whole = threading.RLock()
"""Held by the thread that makes a future whole. One for all: that is rare, and takes microseconds. Reentrant: a garbage
collection meanwhile may run anything."""


Ending = tuple[Any, BaseException | None]
"""A call's result, and its error: CancelledError if it was cancelled. Plain: there is one for every call."""


class Started(concurrent.futures.Future[T]):
    """Cancelling it forgets its requests: what was to be sent counts, as it is then; what comes goes nowhere.

    Most are over before anybody waits for them. So it becomes a whole future, with all that it takes to wait for one,
    only when somebody asks it for any of that, and is then told as every future is. Until then it has its ending alone:
    who writes that first says how it ended."""

    _ending: Ending | None = None
    _is_whole = False
    _signal: asyncio.Event | None = None
    """Set for whoever waits for it on the loop."""

    def __init__(self, thread: LoopThread, forgotten: Callable[[object], object]) -> None:
        """`forgotten`: told on the loop that it was cancelled."""
        self._thread = thread
        self._forgotten = forgotten

    def __getattr__(self, name: str) -> Any:
        """What `Future` sets when it begins: it begins now. Who ends it writes the ending and then looks whether it is
        whole; who makes it whole does the reverse: one of the two sees the other."""
        if name.startswith("__"):
            raise AttributeError(name)
        with _becoming_whole:
            if not self._is_whole:
                super().__init__()
                self._is_whole = True
        if self._ending is not None:
            self._tell(self._ending)
        return self.__getattribute__(name)

    def done(self) -> bool:
        return self._ending is not None

    def cancelled(self) -> bool:
        return self._ending is not None and isinstance(self._ending[1], CancelledError)

    def cancel(self) -> bool:
        if self._end((None, CancelledError())):
            with contextlib.suppress(StoreClosed):  # closed: nothing is done for it any more
                self._thread.at_once(self._forget)
        return self.cancelled()

    def result(self, timeout: float | None = None) -> T:
        if self._ending is None:
            if timeout is None:
                self._thread.run(self._until_done())
            else:
                self._thread.calls.arm_now()
        if self._ending is not None and self._ending[1] is None:
            return cast(T, self._ending[0])
        return super().result(timeout)

    # ---- with the loop held ----

    def succeed(self, result: T) -> None:
        self._finish((result, None))

    def fail(self, error: BaseException) -> None:
        self._finish((None, error))

    def _finish(self, ending: Ending) -> None:
        self._end(ending)
        if self._signal is not None:
            self._signal.set()

    def _forget(self) -> None:
        self._forgotten(self)
        if self._signal is not None:
            self._signal.set()

    async def _until_done(self) -> None:
        """Whoever waits, drives."""
        if not self.done():
            self._signal = self._signal or asyncio.Event()
            await self._signal.wait()

    # ---- from any thread ----

    def _end(self, ending: Ending) -> bool:
        """False: it has ended otherwise."""
        if self.__dict__.setdefault("_ending", ending) is not ending:
            return False
        if self._is_whole:
            self._tell(ending)
        return True

    def _tell(self, ending: Ending) -> None:
        """Tells whoever waits for it, once."""
        told = object()
        if self.__dict__.setdefault("_told", told) is not told:
            return
        result, error = ending
        if isinstance(error, CancelledError):
            super().cancel()
            super().set_running_or_notify_cancel()
        elif error is not None:
            super().set_exception(error)
        else:
            super().set_result(result)
