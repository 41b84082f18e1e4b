"""Virtual time: an event queue, and a trampoline for coroutines that await nothing but its futures."""

from __future__ import annotations

import heapq
import inspect
import itertools
import random
from collections.abc import Callable, Coroutine, Generator
from typing import Any

Action = Callable[[], None]


class Future:
    """The driver's future of protocol/session.py."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._result: Any = None
        self._error: BaseException | None = None
        self._done = self._cancelled = False
        self._waiters: list[Action] = []

    def __await__(self) -> Generator[Future, None, Any]:
        if not self._done:
            yield self
        if self._error is not None:
            raise self._error
        return self._result

    def done(self) -> bool:
        return self._done

    def set_result(self, result: Any, /) -> None:
        self._result = result
        self._finish()

    def set_exception(self, error: BaseException, /) -> None:
        self._error = error
        self._finish()

    def cancel(self) -> None:
        """Whoever waited is no more."""
        self._cancelled = self._cancelled or not self._done
        self._done = True

    def cancelled(self) -> bool:
        return self._cancelled

    def when_done(self, action: Action) -> None:
        """Calls `action` in a later event, as every event loop does: whoever sets a result is not interrupted."""
        if self._done:
            self._world.after(0.0, action)
        else:
            self._waiters.append(action)

    def _finish(self) -> None:
        assert not self._done, "a future is finished once"
        self._done = True
        for action in self._waiters:
            self._world.after(0.0, action)


class Task:
    """A coroutine on its way."""

    def __init__(self, world: World, name: str, coroutine: Coroutine[Future, None, None]) -> None:
        self.name = name
        self.done = False
        self._coroutine = coroutine
        world.after(0.0, self._step)

    def kill(self) -> None:
        """As `kill -9` does it: not another step. It may be called from within the last one."""
        self.done = True

    def _step(self) -> None:
        if self.done:
            if inspect.getcoroutinestate(self._coroutine) == inspect.CORO_CREATED:
                self._coroutine.close()  # killed before its first step
            return
        try:
            awaited = self._coroutine.send(None)
        except StopIteration:
            self.done = True
        else:
            awaited.when_done(self._step)


class World:
    """Everything that happens, in one order that the seed fixes."""

    def __init__(self, seed: object) -> None:
        self.now = 0.0
        self.rng = random.Random(repr(seed))
        self.tasks: list[Task] = []
        self.trace: Callable[[str], None] | None = None
        self._events: list[tuple[float, int, Action]] = []
        self._order = itertools.count()

    def after(self, delay_s: float, action: Action) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), action))

    def at(self, when: float, action: Action) -> None:
        heapq.heappush(self._events, (max(self.now, when), next(self._order), action))

    def spawn(self, name: str, coroutine: Coroutine[Future, None, None]) -> Task:
        task = Task(self, name, coroutine)
        self.tasks.append(task)
        return task

    def future(self) -> Future:
        return Future(self)

    async def sleep(self, delay_s: float) -> None:
        future = self.future()
        self.after(delay_s, lambda: future.set_result(None))
        await future

    def run(self, *, until: Callable[[], bool], limit_s: float) -> None:
        """Runs until `until()`, the time limit, or nothing is left to happen."""
        while self._events and self.now <= limit_s and not until():
            self.now, _, action = heapq.heappop(self._events)
            action()

    def say(self, text: str) -> None:
        if self.trace is not None:
            self.trace(f"{self.now:9.4f}  {text}")
