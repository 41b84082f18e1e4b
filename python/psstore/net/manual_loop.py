"""An asyncio event loop that does nothing by itself: whoever holds it polls, and gives it its turns.

Between two turns it may pass to another thread. It has what psstore's client needs of asyncio.AbstractEventLoop, which
is all that tasks, futures, `asyncio.sleep` and the like ask of a loop. It has no transports: who has a socket watches
it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import ctypes
import heapq
import logging
import os
import select
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

T = TypeVar("T")

Callback = Callable[[], object]

_ring = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_uint64)(("eventfd_write", ctypes.PyDLL(None)))
"""With the GIL: `os.eventfd_write` lets go of it, and a caller that only starts something would wait for the thread
that it woke."""

_log = logging.getLogger("psstore.client")


class ManualLoop:
    """One thread at a time may use it, but for `poll`, `wake` and `call_soon_threadsafe`."""

    def __init__(self) -> None:
        self._sockets = select.epoll()
        self._readers: dict[int, Callback] = {}
        self._writers: dict[int, Callback] = {}
        self.ready: deque[asyncio.Handle] = deque()
        """What the next turn has to do without any event."""
        self._timers: list[asyncio.TimerHandle] = []
        """A heap by time; those that were cancelled stay until their time."""
        self.on_distrust: Callable[[], object] = _nothing
        """Ends the connections on this loop."""
        self._executor: concurrent.futures.ThreadPoolExecutor | None = None
        self._closed = False
        self.on_call: Callable[[], object] = _nothing
        """Told of each call that another thread may have asked for, until the loop is closed."""
        self.wakeup_fd = wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, wakeup_fd)  # no sooner: `wake` must not hit another file that got its number
        self.add_reader(wakeup_fd, os.eventfd_read, wakeup_fd)

    # ---- what its holder calls ----

    def fileno(self) -> int:
        """Readable when a poll would find something."""
        return self._sockets.fileno()

    def poll(self, timeout_s: float | None) -> Sequence[tuple[int, int]]:
        """Waits for events; `turn` deals with them. The one call that needs no holder."""
        return self._sockets.poll(timeout_s)

    def wake(self) -> None:
        """Ends a poll, now or the next one. From any thread, also in a signal handler."""
        _ring(self.wakeup_fd, 1)

    def has_ready(self) -> bool:
        """The next turn has something to do without any event."""
        return bool(self.ready)

    def next_wake(self) -> float | None:
        """When the next turn is due, whatever comes: now or past if something is ready."""
        if self.ready:
            return 0.0
        while self._timers and self._timers[0].cancelled():
            heapq.heappop(self._timers)
        return self._timers[0].when() if self._timers else None

    def turn(self, events: Sequence[tuple[int, int]]) -> None:
        """Deals with the events, with the timers that are due, and with what was ready before."""
        try:
            self._turn(events)
        except BaseException:
            self.distrust()
            raise

    def distrust(self) -> None:
        """An exception struck from outside, as of a signal that is not put off: how far the connections are is not
        known. Ends them; what was not answered is sent again on the next ones."""
        self.on_distrust()

    def _turn(self, events: Sequence[tuple[int, int]]) -> None:
        for fd, mask in events:
            self._deal_with(fd, mask)
        if self._timers:
            now = self.time()
            while self._timers and self._timers[0].when() <= now:
                self.ready.append(heapq.heappop(self._timers))
        for _ in range(len(self.ready)):
            handle = self.ready.popleft()
            if not handle.cancelled():
                handle._run()

    # ---- sockets ----

    def add_reader(self, fd: Any, callback: Callable[..., object], *args: Any) -> None:
        """Calls it when the socket is readable or at its end, and when somebody else has had it watched for room
        (EPOLLOUT), as the extension does for what it could not send."""
        self._watch(_number(fd), self._readers, partial(callback, *args))

    def remove_reader(self, fd: Any) -> bool:
        return self._unwatch(_number(fd), self._readers)

    def add_writer(self, fd: Any, callback: Callable[..., object], *args: Any) -> None:
        self._watch(_number(fd), self._writers, partial(callback, *args))

    def remove_writer(self, fd: Any) -> bool:
        return self._unwatch(_number(fd), self._writers)

    def _watch(self, fd: int, callbacks: dict[int, Callback], callback: Callback) -> None:
        is_new = fd not in self._readers and fd not in self._writers
        callbacks[fd] = callback
        (self._sockets.register if is_new else self._sockets.modify)(fd, self._mask(fd))

    def _unwatch(self, fd: int, callbacks: dict[int, Callback]) -> bool:
        if callbacks.pop(fd, None) is None:
            return False
        if fd in self._readers or fd in self._writers:
            self._sockets.modify(fd, self._mask(fd))
        else:
            self._sockets.unregister(fd)
        return True

    def _mask(self, fd: int) -> int:
        return (select.EPOLLIN if fd in self._readers else 0) | (select.EPOLLOUT if fd in self._writers else 0)

    def _deal_with(self, fd: int, mask: int) -> None:
        if mask & select.EPOLLOUT:
            if writer := self._writers.get(fd):
                writer()
            elif fd in self._readers:
                self._sockets.modify(fd, self._mask(fd))
                mask |= select.EPOLLIN
        if mask & ~select.EPOLLOUT and (callback := self._readers.get(fd) or self._writers.get(fd)):
            callback()

    def bell(self, callback: Callback) -> Callback:
        """What, called by any thread, has the loop call `callback` once or more, as if a socket had become readable:
        nothing is ready meanwhile."""
        fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, fd)

        def rung() -> None:
            os.eventfd_read(fd)
            callback()

        self.add_reader(fd, rung)
        return partial(_ring, fd, 1)

    # ---- asyncio's interface ----

    @property
    def as_asyncio(self) -> asyncio.AbstractEventLoop:
        """This loop, for what is written for asyncio."""
        return cast(asyncio.AbstractEventLoop, self)

    time = staticmethod(time.monotonic)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self._closed

    def is_closed(self) -> bool:
        return self._closed

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self.as_asyncio)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self.as_asyncio, **options)

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self.as_asyncio, context)
        self.ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = self.call_soon(callback, *args, context=context)
        self.wake()
        self.on_call()
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self.as_asyncio, context)
        heapq.heappush(self._timers, handle)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Asked for by asyncio.TimerHandle."""

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        if self._executor is None:
            self._executor = concurrent.futures.ThreadPoolExecutor(1, "psstore-resolver")
        return asyncio.wrap_future(self._executor.submit(func, *args), loop=self.as_asyncio)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        _log.error("%s", context.get("message"), exc_info=context.get("exception"))

    def close(self) -> None:
        """Nothing may be under way."""
        self._closed = True
        self.on_call = self.on_distrust = _nothing
        self._timers.clear()
        self._readers.clear()
        if self._executor is not None:
            self._executor.shutdown(wait=False)
        self._sockets.close()


def _nothing() -> None: ...


def _number(fd: int | socket.socket) -> int:
    return fd if isinstance(fd, int) else fd.fileno()
