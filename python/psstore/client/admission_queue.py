"""What waits for its turn, in order: the first goes as soon as there is room for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class AdmissionQueue(Generic[T]):
    """`release` is to be called whenever there may be more room."""

    def __init__(self, fits: Callable[[T], bool], go: Callable[[T], object]) -> None:
        self.queue: deque[T] = deque()
        self._fits = fits
        self._go = go
        self._releasing = False
        """Some go now. Should one end at once, and make room, those behind it go where this was set: not one inside
        the other, of which there may be more than calls may be nested."""

    def release(self) -> None:
        if self._releasing:
            return
        self._releasing = True
        try:
            while self.queue and self._fits(self.queue[0]):
                self._go(self.queue.popleft())
        finally:
            self._releasing = False
