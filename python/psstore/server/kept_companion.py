"""Keeping a process running that is beside the shards: it is started again when it ends by itself, unless it does so at
once, again and again."""

from __future__ import annotations

import logging
import math
import selectors
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from psstore.server.processes import Companion, ShortLives

C = TypeVar("C", bound=Companion)

PAUSE_S = 10.0
"""Before it is tried again to start what could not be."""

_log = logging.getLogger("psstore.supervisor")


class KeptCompanion(Generic[C]):
    """One that runs, or does not at the moment: `process` is None then."""

    def __init__(
        self, start: Callable[[], C], selector: selectors.BaseSelector, *, name: str, when_let_be: str
    ) -> None:
        """`selector`: where its report is registered, with the process as data. `name`: of what it does. `when_let_be`:
        what follows if it is not started any more."""
        self.process: C | None = None
        self.is_to_run = False
        """Begun, and not ended: if there is no process, it is let be, or can't be started."""
        self._start = start
        self._selector = selector
        self._name = name
        self._when_let_be = when_let_be
        self._lives = ShortLives()
        self._start_at = math.inf
        """When that is tried again."""

    def begin(self) -> None:
        """Now, or as soon as the machine has room for another process. REQUIRES: it does not run."""
        self.is_to_run = True
        try:
            self.process = self._start()
        except OSError as error:
            _log.error("what %s can't be started, and is tried again in %g s: %s", self._name, PAUSE_S, error)
            self._start_at = time.monotonic() + PAUSE_S
        else:
            self._start_at = math.inf
            self._selector.register(self.process.report, selectors.EVENT_READ, self.process)

    def next_wake(self) -> float:
        """When `tick` may do something."""
        return self._start_at

    def tick(self) -> None:
        """Does what is due."""
        if self._start_at <= time.monotonic():
            self.begin()

    def begin_again(self) -> None:
        """REQUIRES: it has ended by itself."""
        assert self.process is not None, "it has told us of its end"
        may_start = self._lives.may_start_again(self.process)
        self._clear_away()
        if not may_start:
            _log.error("what %s ends as soon as it is started: %s", self._name, self._when_let_be)
            return
        _log.warning("what %s has ended, and is started again", self._name)
        self.begin()

    def end(self) -> None:
        """At once, if it runs, and it is not tried again."""
        self.is_to_run = False
        self._clear_away()

    def _clear_away(self) -> None:
        self._start_at = math.inf
        if self.process is not None:
            self._selector.unregister(self.process.report)
            self.process.kill()
            self.process = None
