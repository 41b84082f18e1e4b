"""What a worker of the demo tells the command: where it is, and in the end what it did."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from psstore.cli.demo.data import Digits
from psstore.cli.demo.messages import Settings, WorkerProgress, WorkerResult, emit

if TYPE_CHECKING:
    from psstore.cli.demo.worker import Peers

REPORT_S = 0.1
"""Between two reports: as often as a display is worth redrawing."""


class Reporter:
    """Counts what this worker did since the reporter was made, and tells the command, but not too often."""

    def __init__(self, peers: Peers, settings: Settings, *, rounds: int) -> None:
        self._peers = peers
        self._settings = settings
        self._rounds = rounds
        self._done_before = peers.round - 1
        self._images = 0
        self._max_staleness = 0
        self._bytes_before = peers.bytes_moved
        self._began = self._reported = time.perf_counter()

    def stepped(self, round: int, loss: float) -> None:
        staleness = self._peers.staleness
        self._images += self._settings.batch_images
        self._max_staleness = max(self._max_staleness, staleness)
        now = time.perf_counter()
        is_soon = now - self._reported < REPORT_S and self._settings.hold_after is None
        if is_soon and round < self._rounds:
            return
        self._reported = now
        emit(
            WorkerProgress(
                rank=self._peers.rank,
                round=round,
                rounds=self._rounds,
                epoch=-(-round * self._settings.epochs // self._rounds),
                epochs=self._settings.epochs,
                loss=loss,
                images_per_s=self._images / (now - self._began),
                staleness=staleness,
            )
        )

    def result(self, digits: Digits) -> WorkerResult:
        """What was done until now; the accuracy of the final weights is yet to be found."""
        sent, received = (now - before for now, before in zip(self._peers.bytes_moved, self._bytes_before, strict=True))
        return WorkerResult(
            rank=self._peers.rank,
            done_before=self._done_before,
            images=self._images,
            seconds=time.perf_counter() - self._began,
            bytes_pushed=sent,
            bytes_pulled=received,
            max_staleness=self._max_staleness,
            accuracy=0.0,
            test_images=len(digits.test_labels),
            dataset=digits.name,
        )
