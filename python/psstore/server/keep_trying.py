"""Trying again what a store that goes on cannot do for now: storage that fails may do so for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

E = TypeVar("E", bound=Exception)
T = TypeVar("T")

FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 5.0
"""Before it is tried again: doubles from the first to the last."""


def keep_trying(
    attempt: Callable[[], T],
    errors: type[E] | tuple[type[E], ...],
    *,
    patience_s: float,
    pause: Callable[[E, float], T | None],
) -> T:
    """What the attempt comes to. It is made again after one of these errors, but not after `patience_s`. `pause` waits
    for so many seconds after an error: if it raises one itself, or returns anything but None, that is the end of it."""
    until, pause_s = time.monotonic() + patience_s, FIRST_PAUSE_S
    while True:
        try:
            return attempt()
        except errors as error:
            if time.monotonic() >= until:
                raise
            failed = error
        ended = pause(failed, pause_s)
        if ended is not None:
            return ended
        pause_s = min(2 * pause_s, LAST_PAUSE_S)
