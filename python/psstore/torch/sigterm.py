"""What SIGTERM does during a session: it asks this worker to leave, and still ends what its steps have forked."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_handler: Callable[[int, FrameType | None], None] | None = None
_watches_forks = False
_forking = threading.local()


@contextmanager
def handled(ask_to_leave: Callable[[], None]) -> Iterator[None]:
    """In the block, SIGTERM calls `ask_to_leave` in this process; where that is nobody's yet, and it can be had.

    A forked child has the default again, as a `multiprocessing.Pool` sends SIGTERM to its processes at its end, and
    waits for them. One that comes before that is kept back until then: Python's own way would lose it.
    """
    global _handler, _watches_forks
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    if not _watches_forks:
        os.register_at_fork(before=_keep_back, after_in_parent=_let_through, after_in_child=_begin_child)
        _watches_forks = True

    def leave(number: int, frame: FrameType | None) -> None:
        ask_to_leave()

    _handler = leave
    signal.signal(signal.SIGTERM, _handler)
    try:
        yield
    finally:
        _give_up()


def _give_up() -> None:
    global _handler
    if _handler is not None and signal.getsignal(signal.SIGTERM) is _handler:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _handler = None


def _keep_back() -> None:
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}) if _handler is not None else None


def _let_through() -> None:
    if _forking.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _begin_child() -> None:
    if _forking.mask is not None:
        _give_up()
    _let_through()
