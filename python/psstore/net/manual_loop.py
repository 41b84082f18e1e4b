"""An asyncio event loop that does nothing by itself: whoever holds it polls, and gives it its turns.

Between two turns it may pass to another thread. It has what psstore's client needs of asyncio.AbstractEventLoop, which
is all that tasks, futures, `asyncio.sleep` and the like ask of a loop; its only transport is `Stream`.
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
from typing import Any, TypeVar, cast

from psstore.net.stream import Stream

T = TypeVar("T")

Watcher = Callable[[int], object]
"""Called with a mask of EPOLLIN, EPOLLOUT, EPOLLHUP, EPOLLERR."""

_ring = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_uint64)(("eventfd_write", ctypes.PyDLL(None)))
"""With the GIL: `os.eventfd_write` lets go of it, and a caller that only starts something would wait for the thread
that it woke."""

_log = logging.getLogger("psstore.client")


class ManualLoop:
    """One thread at a time may use it, but for `poll`, `wake` and `call_soon_threadsafe`."""

    def __init__(self) -> None:
        self._sockets = select.epoll()
        self._watchers: dict[int, Watcher] = {}
        self.ready: deque[asyncio.Handle] = deque()
        """What the next turn has to do without any event."""
        self._timers: list[asyncio.TimerHandle] = []
        """A heap by time; those that were cancelled stay until their time."""
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._executor: concurrent.futures.ThreadPoolExecutor | None = None
        self._closed = False
        self.on_call: Callable[[], object] = _nothing
        """Told of each call that another thread may have asked for, until the loop is closed."""
        self.bell = bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, bell)  # no sooner: `wake` must not hit another file that got its number
        self.watch(bell, select.EPOLLIN, lambda _: os.eventfd_read(bell))

    # ---- what its holder calls ----

    def fileno(self) -> int:
        """Readable when a poll would find something."""
        return self._sockets.fileno()

    def poll(self, timeout_s: float | None) -> Sequence[tuple[int, int]]:
        """Waits for events; `turn` deals with them. The one call that needs no holder."""
        return self._sockets.poll(timeout_s)

    def wake(self) -> None:
        """Ends a poll, now or the next one. From any thread, also in a signal handler."""
        _ring(self.bell, 1)

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
        """An exception struck from outside, as of a signal's handler: how far the connections are is not known. Ends
        them; what was not answered is sent again on the next ones."""
        for stream in list(self._streams):
            stream.abort()

    def _turn(self, events: Sequence[tuple[int, int]]) -> None:
        for fd, mask in events:
            watcher = self._watchers.get(fd)
            if watcher is not None:
                watcher(mask)
        if self._timers:
            now = self.time()
            while self._timers and self._timers[0].when() <= now:
                self.ready.append(heapq.heappop(self._timers))
        for _ in range(len(self.ready)):
            handle = self.ready.popleft()
            if not handle.cancelled():
                handle._run()

    # ---- sockets ----

    def watch(self, fd: int, mask: int, watcher: Watcher) -> None:
        """Calls `watcher` from now on with the events of `mask`; changes the mask of one that is watched already."""
        if fd in self._watchers:
            self._sockets.modify(fd, mask)
        else:
            self._sockets.register(fd, mask)
        self._watchers[fd] = watcher

    def forget(self, fd: int) -> None:
        if self._watchers.pop(fd, None) is not None:
            self._sockets.unregister(fd)

    def add_writer(self, fd: Any, callback: Callable[..., object], *args: Any) -> None:
        self.watch(_number(fd), select.EPOLLOUT, lambda _: callback(*args))

    def remove_writer(self, fd: Any) -> bool:
        known = _number(fd) in self._watchers
        self.forget(_number(fd))
        return known

    async def create_connection(self, protocol_factory: Any, *_: Any, sock: Any = None, **__: Any) -> Any:
        """Over a socket that is connected already; the protocol is a BufferedProtocol."""
        protocol = protocol_factory()
        stream = Stream(self, sock, protocol)
        self._streams.add(stream)
        try:
            protocol.connection_made(stream)
        except BaseException:
            stream.abort()
            raise
        return stream, protocol

    create_unix_connection = create_connection

    # ---- asyncio's interface ----

    def time(self) -> float:
        return time.monotonic()

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self._closed

    def is_closed(self) -> bool:
        return self._closed

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self._itself())

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self._itself(), **options)

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self._itself(), context)
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
        handle = asyncio.TimerHandle(when, callback, args, self._itself(), context)
        heapq.heappush(self._timers, handle)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Asked for by asyncio.TimerHandle."""

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        if self._executor is None:
            self._executor = concurrent.futures.ThreadPoolExecutor(1, "psstore-resolver")
        return asyncio.wrap_future(self._executor.submit(func, *args), loop=self._itself())

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        _log.error("%s", context.get("message"), exc_info=context.get("exception"))

    def _itself(self) -> asyncio.AbstractEventLoop:
        return cast(asyncio.AbstractEventLoop, self)

    def close(self) -> None:
        """Nothing may be under way."""
        self._closed = True
        self.on_call = _nothing
        if self._executor is not None:
            self._executor.shutdown(wait=False)
        self._sockets.close()


def _nothing() -> None: ...


def _number(fd: int | socket.socket) -> int:
    return fd if isinstance(fd, int) else fd.fileno()
