"""A call that was started, without a task for it: whoever takes its last answer ends it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures._base import CANCELLED_AND_NOTIFIED, FINISHED, PENDING
from typing import Any, TypeVar, cast

from psstore.client.loop_thread import LoopThread

T = TypeVar("T")


class Started(concurrent.futures.Future[T]):
    """Cancelling it forgets its requests: what was sent counts, what comes goes nowhere.

    Most are over before anybody waits for them. So it has what a future waits with only when somebody asks for it, and
    a `_state` of its own only when it is over: who writes that first says how it ended."""

    _state = PENDING
    _result = None
    _exception = None
    _watched = False
    """Somebody may wait for it."""
    _signal: asyncio.Event | None = None
    """Of those who wait for it on the loop."""

    def __init__(self, thread: LoopThread, forgotten: Callable[[object], object]) -> None:
        """`forgotten`: told on the loop that it was cancelled."""
        self._thread = thread
        self._forgotten = forgotten

    def __getattr__(self, name: str) -> Any:
        """What `Future` waits with. Who ends it writes its state and then looks whether it is watched; who waits does
        the reverse: one of the two sees the other."""
        if name == "_condition":
            self._watched = True
            return self.__dict__.setdefault(name, threading.Condition())
        if name in ("_waiters", "_done_callbacks"):
            return self.__dict__.setdefault(name, [])
        raise AttributeError(f"{type(self).__name__} has no {name}")

    def done(self) -> bool:
        return self._state != PENDING

    def cancelled(self) -> bool:
        return self._state == CANCELLED_AND_NOTIFIED

    def cancel(self) -> bool:
        with self._condition:  # of several threads one cancels it
            if self.done():
                return self.cancelled()
            self.__dict__.setdefault("_state", CANCELLED_AND_NOTIFIED)
        if self.cancelled():
            self._tell()
            self._thread.loop.call_soon_threadsafe(self._forget)
        return self.cancelled()

    def result(self, timeout: float | None = None) -> T:
        if not self.done():
            if timeout is None:
                self._thread.run(self._until_done())
            else:
                self._thread.lane.hasten()
        if self._state == FINISHED and self._exception is None:
            return cast(T, self._result)
        return super().result(timeout)

    # ---- with the loop held ----

    def succeed(self, result: T) -> None:
        self._result = result
        self._finish()

    def fail(self, error: BaseException) -> None:
        self._exception = error
        self._finish()

    def _finish(self) -> None:
        if self.__dict__.setdefault("_state", FINISHED) == FINISHED and self._watched:
            self._tell()
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

    # ---- how ----

    def _tell(self) -> None:
        """Those who wait for it in the ways of `concurrent.futures`."""
        with self._condition:
            for waiter in self._waiters:
                if self.cancelled():
                    waiter.add_cancelled(self)
                elif self._exception is not None:
                    waiter.add_exception(self)
                else:
                    waiter.add_result(self)
            self._condition.notify_all()
        self._invoke_callbacks()


class Unfinished:
    """What is left of a started call when its requests are their sessions': it ends with the last of them."""

    def __init__(
        self,
        whole: Started[Any],
        answers: Sequence[Any],
        conclude: Callable[[Sequence[Part]], Coroutine[Any, Any, Any]],
    ) -> None:
        """`answers`: those that have come already, else None. `conclude`: what the call comes to, of parts that have
        all ended; runs with the loop held."""
        self.whole = whole
        self.parts = [Part(self) for _ in answers]
        self._left = len(answers)
        self._conclude = conclude
        for part, answer in zip(self.parts, answers, strict=True):
            if answer is not None:
                part.set_result(answer)

    def part_ended(self) -> None:
        self._left -= 1
        if self._left or self.whole.done():
            return
        try:
            self._conclude(self.parts).send(None)
        except StopIteration as stop:
            self.whole.succeed(stop.value)
        except Exception as error:
            self.whole.fail(error)


class Part:
    """What one of the call's requests came to."""

    __slots__ = ("_call", "_error", "_over", "_result")

    def __init__(self, call: Unfinished) -> None:
        self._call = call
        self._result: Any = None
        self._error: BaseException | None = None
        self._over = False

    @property
    def result(self) -> Any:
        """None: there is none, or it failed."""
        return self._result

    def done(self) -> bool:
        return self._over or self._call.whole.cancelled()

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
