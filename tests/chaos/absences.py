"""Workers that have left and mean to come back, which others may wait for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

LOOK_S = 0.02


class Absences:
    """Files in a folder that all of them see."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextlib.contextmanager
    def of(self, rank: int) -> Iterator[None]:
        """Meanwhile that one is away, and still is if it dies."""
        self.begin(rank)
        yield
        self.over(rank)

    def begin(self, rank: int) -> None:
        """From now on it is away, or about to be."""
        self._file(rank).touch()

    def over(self, rank: int) -> None:
        """It is there, in whichever of its lives."""
        self._file(rank).unlink(missing_ok=True)

    def await_none(self, timeout_s: float) -> None:
        """Blocks until nobody is away, or for so long."""
        until = time.monotonic() + timeout_s
        while any(self._folder.glob("away-*")) and time.monotonic() < until:
            time.sleep(LOOK_S)

    def _file(self, rank: int) -> Path:
        return self._folder / f"away-{rank}"
