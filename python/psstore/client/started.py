"""A call that was started, without a task for it: whoever takes its last answer completes it."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, TypeVar

from psstore.client.loop_thread import LoopThread

T = TypeVar("T")


class Started(concurrent.futures.Future[T]):
    """Its requests are their sessions'. Cancelling forgets them: what was sent counts, what comes goes nowhere."""

    def __init__(
        self,
        num_requests: int,
        *,
        conclude: Callable[[Sequence[Part]], Coroutine[Any, Any, T]],
        ended: Callable[[object], None],
        thread: LoopThread,
    ) -> None:
        """`conclude`: what the call comes to, of parts that have all ended. `ended`: told of this, once, however it
        ends. Both run with the loop held."""
        super().__init__()
        self.parts = [Part(self) for _ in range(num_requests)]
        """The futures of its requests."""
        self._left = num_requests
        self._over = False
        self._conclude = conclude
        self._ended = ended
        self._thread = thread
        self._signal: asyncio.Event | None = None
        """Of those who wait for it on the loop."""

    def cancel(self) -> bool:
        cancelled = super().cancel()
        if cancelled:
            self._thread.loop.call_soon_threadsafe(self._end)
        return cancelled

    def result(self, timeout: float | None = None) -> T:
        if not self.done():
            if timeout is None:
                self._thread.run(self._until_done())
            else:
                self._thread.lane.hasten()
        return super().result(timeout)

    async def _until_done(self) -> None:
        """Whoever waits, drives."""
        if not self.done():
            self._signal = self._signal or asyncio.Event()
            await self._signal.wait()

    def part_ended(self) -> None:
        self._left -= 1
        if not self._left:
            self._end()

    def _end(self) -> None:
        """All parts have ended, or it was cancelled; or both, one after the other."""
        if self._over:
            return
        self._over = True
        self._ended(self)
        if self.set_running_or_notify_cancel():
            try:
                self._conclude(self.parts).send(None)
            except StopIteration as stop:
                self.set_result(stop.value)
            except Exception as error:
                self.set_exception(error)
        if self._signal is not None:
            self._signal.set()


class Part:
    """What one of the call's requests came to."""

    __slots__ = ("_call", "_error", "_over", "_result")

    def __init__(self, call: Started[Any]) -> None:
        self._call = call
        self._result: Any = None
        self._error: BaseException | None = None
        self._over = False

    @property
    def result(self) -> Any:
        """None: there is none, or it failed."""
        return self._result

    def done(self) -> bool:
        return self._over or self._call.cancelled()

    def set_result(self, result: Any, /) -> None:
        self._result, self._over = result, True
        self._call.part_ended()

    def set_exception(self, error: BaseException, /) -> None:
        self._error, self._over = error, True
        self._call.part_ended()

    def __await__(self) -> Generator[Any, Any, Any]:
        """REQUIRES: it is done."""
        yield from ()
        if self._error is not None:
            raise self._error
        return self._result
