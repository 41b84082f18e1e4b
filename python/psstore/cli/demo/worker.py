"""One worker of the demo: a process that `psstore demo` starts through the launcher.

python -m psstore.cli.demo.worker SETTINGS-AS-JSON
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import torch

import psstore
from psstore.cli.demo.data import load
from psstore.cli.demo.events import Finished, Progress, emit
from psstore.cli.demo.settings import Settings
from psstore.cli.demo.training import Batch, Batches, accuracy, backward, cosine, plain_optimizer, seeded_model
from psstore.torch import DistributedOptimizer

REPORT_S = 0.1
"""Between two reports: as often as a display is worth redrawing."""


class Reporter:
    """Tells the command how this worker is doing, but not too often."""

    def __init__(self, store: psstore.Store, settings: Settings, *, rank: int, rounds: int) -> None:
        self.images = 0
        self.max_staleness = 0
        self._store = store
        self._rank = rank
        self._rounds = rounds
        self._epochs = settings.epochs
        self._batch_images = settings.batch_images
        self._pushed_before, self._pulled_before = store.bytes_pushed, store.bytes_pulled
        self._began = time.perf_counter()
        self._reported = self._began

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    @property
    def bytes_moved(self) -> tuple[int, int]:
        """Pushed and pulled, since this reporter was made."""
        return self._store.bytes_pushed - self._pushed_before, self._store.bytes_pulled - self._pulled_before

    def stepped(self, round: int, loss: float) -> None:
        self.images += self._batch_images
        self.max_staleness = max(self.max_staleness, self._store.staleness)
        now = time.perf_counter()
        if now - self._reported < REPORT_S and round < self._rounds:
            return
        self._reported = now
        emit(
            Progress(
                rank=self._rank,
                round=round,
                rounds=self._rounds,
                epoch=-(-round * self._epochs // self._rounds),
                epochs=self._epochs,
                loss=loss,
                images_per_s=self.images / self.seconds,
                staleness=self._store.staleness,
            )
        )


def endless(batches: Batches) -> Iterator[Batch]:
    epoch = 0
    while True:
        yield from batches.epoch(epoch)
        epoch += 1


def train(settings: Settings, store: psstore.Store, rank: int) -> None:
    """Until the store is past the last round. Counting the store's rounds, not ours, is what lets a backup
    worker that was late catch up."""
    digits = load(settings.data_dir)
    model = seeded_model(digits, settings.seed + rank)  # rank 0's values are what everybody gets
    optimizer = DistributedOptimizer(plain_optimizer(model, settings), store, named_parameters=model.named_parameters())
    batches = Batches(digits, settings, rank=rank)
    rounds = settings.epochs * len(batches)
    schedule = cosine(optimizer, rounds)
    store.barrier("start")
    reporter = Reporter(store, settings, rank=rank, rounds=rounds)
    stream = endless(batches)
    while (round := store.round) <= rounds:
        optimizer.zero_grad()
        loss = backward(model, next(stream))
        optimizer.step()
        schedule.step()
        reporter.stepped(round, loss)
    seconds = reporter.seconds
    pushed, pulled = reporter.bytes_moved
    store.barrier("end")
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    store.pull_many(list(weights), out=list(weights.values()))
    if rank == 0 and settings.weights_path is not None:
        arrays: dict[str, Any] = {name: value.numpy() for name, value in weights.items()}
        np.savez(settings.weights_path, **arrays)
    emit(
        Finished(
            rank=rank,
            images=reporter.images,
            seconds=seconds,
            bytes_pushed=pushed,
            bytes_pulled=pulled,
            max_staleness=reporter.max_staleness,
            accuracy=accuracy(model, digits),
            test_images=len(digits.test_labels),
            dataset=digits.name,
        )
    )


def main() -> None:
    torch.set_num_threads(1)
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    with psstore.connect() as store:
        assert store.rank is not None, "a store is joined as a worker unless it is told otherwise"
        train(settings, store, store.rank)


if __name__ == "__main__":
    main()
