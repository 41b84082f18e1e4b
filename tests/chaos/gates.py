"""Steps after which rank 0 waits until whoever disturbs the training is ready to: looking for a process takes longer
than many steps on a busy machine. What happens then happens to a training that goes on."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

LOOK_S = 0.005


class Gates:
    """Files in a folder that both sides see."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def shut(self, steps: Iterable[int]) -> None:
        for step in set(steps):
            self._shut(step).touch()

    def open(self, step: int) -> None:
        self._shut(step).unlink(missing_ok=True)

    def pass_by(self, step: int) -> None:
        """Blocks while there is a gate after that step, and it is shut."""
        while self._shut(step).exists():
            time.sleep(LOOK_S)

    def _shut(self, step: int) -> Path:
        return self._folder / f"gate-{step}"
