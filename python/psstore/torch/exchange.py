"""Exchange: calls of a store, one after the other, that may be under way while training goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Thread


class Exchange:
    """Stages of one exchange with a store. One that fails is kept, and taken again when somebody waits for the end once
    more: calls of a store may be repeated."""

    def __init__(self, *stages: Callable[[], object]) -> None:
        self._stages = deque(stages)
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    def start(self) -> None:
        """Goes through the stages on a thread of its own. Where the system has no room for one, `finish` does."""
        thread = Thread(target=self._try, name="psstore exchange", daemon=True)
        with suppress(RuntimeError):
            thread.start()
            self._thread = thread

    def finish(self) -> None:
        """Returns when all stages are over; raises what one of them raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        self._run()

    def _try(self) -> None:
        try:
            self._run()
        except BaseException as error:  # handed to whoever waits for the end
            self._error = error

    def _run(self) -> None:
        while self._stages:
            self._stages[0]()
            self._stages.popleft()
