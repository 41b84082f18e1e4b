"""Puts off signals while a caller does a store's work on its own thread, which must not end halfway."""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_signal: Any = importlib.import_module("_signal")
"""What `signal` wraps: 0.5 us for two changes of a handler instead of 10 us, of a call that takes 60."""

_getsignal, _set_signal = _signal.getsignal, _signal.signal

SYSTEMS = _signal.SIG_IGN
"""Neither that nor SIG_DFL, which is 0, nor None, a handler that is not Python's, is put off."""

Handler = Callable[[int, FrameType | None], Any]

PUT_OFF = tuple(
    int(getattr(signal, name))  # a bare number is looked up ten times as fast as its name
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGCHLD", "SIGUSR1", "SIGUSR2")
)
"""Signals whose handlers are known to raise: Ctrl-C, requests to end, time limits, a DataLoader's worker that died."""


class Interrupts:
    """From `begin` to `end` these signals are noted, and end what the thread waits for; `deliver` does what they mean.

    Only the main thread has it, and only for signals that Python code handles; on others nothing happens here.
    """

    __slots__ = ("_main", "_previous", "pending", "wake")

    def __init__(self, wake: Callable[[], object], *, main: int | None) -> None:
        """`main`: number of this process's main thread."""
        self.wake = wake
        """Ends the wait that the thread is in."""
        self._main = main
        self.pending: dict[int, FrameType | None] = {}
        """What came and is not delivered yet, each with where it struck."""
        self._previous: tuple[tuple[int, Handler], ...] = ()
        """The program's handlers, by signal."""

    def begin(self) -> None:
        """A handler that is not put off yet may raise here: `end` is due all the same."""
        if threading.get_ident() == self._main:
            for number in PUT_OFF:
                previous = _getsignal(number)
                if previous and previous is not SYSTEMS:
                    self._previous += ((number, previous),)
                    _set_signal(number, self._note)

    def end(self) -> None:
        """Also delivers what was noted last."""
        if not self._previous:
            return
        try:
            for number, previous in self._previous:
                if _getsignal(number) == self._note:  # nobody has set another one meanwhile
                    _set_signal(number, previous)
        except BaseException:  # from a handler that is back already, while others are not
            self.end()
            raise
        if self.pending:
            self.deliver()

    def deliver(self) -> None:
        """Calls the program's handlers, which usually raise, as KeyboardInterrupt."""
        if self.pending:
            number, frame = self.pending.popitem()
            try:
                dict(self._previous)[number](number, frame)
            finally:
                self.deliver()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if threading.get_ident() != self._main:  # in a child that another thread has forked: no call goes on there
            dict(self._previous)[number](number, frame)
            return
        self.pending[number] = frame
        self.wake()
