"""Puts off Ctrl-C while a caller does a store's work on its own thread, which must not end halfway."""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_signal: Any = importlib.import_module("_signal")
"""What `signal` wraps: 0.5 us for two changes of a handler instead of 10 us, of a call that takes 60."""

Handler = Callable[[int, FrameType | None], Any]


class Interrupts:
    """From `begin` to `end` SIGINT is noted, and ends what the thread waits for; `deliver` does what it means.

    Only the main thread has it, and only if Python code handles it; on others nothing happens here.
    """

    __slots__ = ("_frame", "_main", "_previous", "pending", "wake")

    def __init__(self, wake: Callable[[], object], *, main: int | None) -> None:
        """`main`: number of this process's main thread."""
        self.wake = wake
        """Ends the wait that the thread is in."""
        self._main = main
        self.pending = False
        self._frame: FrameType | None = None
        self._previous: Handler | None = None

    def begin(self) -> None:
        if threading.get_ident() == self._main:
            previous = _signal.getsignal(signal.SIGINT)
            if callable(previous):
                self._previous = previous
                _signal.signal(signal.SIGINT, self._note)

    def end(self) -> None:
        """Also delivers what was noted last."""
        if self._previous is not None:
            if _signal.getsignal(signal.SIGINT) == self._note:  # nobody has set another one meanwhile
                _signal.signal(signal.SIGINT, self._previous)
            if self.pending:
                self.deliver()

    def deliver(self) -> None:
        """Calls the program's handler, which usually raises KeyboardInterrupt."""
        self.pending = False
        if self._previous is not None:
            self._previous(signal.SIGINT, self._frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.pending, self._frame = True, frame
        self.wake()
