"""One worker of the demo: a process that `psstore demo` starts through the launcher.

python -m psstore.cli.demo.worker SETTINGS-AS-JSON
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from psstore.cli.demo.all_reduce import all_reduce
from psstore.cli.demo.data import load
from psstore.cli.demo.events import Finished, Progress, emit
from psstore.cli.demo.model_averaging import model_averaging
from psstore.cli.demo.parameter_server import parameter_server
from psstore.cli.demo.peers import Peers
from psstore.cli.demo.settings import Settings, Strategy
from psstore.cli.demo.training import Batch, Batches, accuracy, backward, cosine, plain_optimizer, seeded_model

STRATEGIES: Mapping[Strategy, Callable[[Settings], AbstractContextManager[Peers]]] = {
    Strategy.ps: parameter_server,
    Strategy.allreduce: all_reduce,
    Strategy.average: model_averaging,
}

REPORT_S = 0.1
"""Between two reports: as often as a display is worth redrawing."""


class Reporter:
    """Tells the command how this worker is doing, but not too often."""

    def __init__(self, peers: Peers, settings: Settings, *, rounds: int) -> None:
        self.images = 0
        self.max_staleness = 0
        self._peers = peers
        self._rounds = rounds
        self._epochs = settings.epochs
        self._batch_images = settings.batch_images
        self._sent_before, self._received_before = peers.bytes_moved
        self._began = time.perf_counter()
        self._reported = self._began

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    @property
    def bytes_moved(self) -> tuple[int, int]:
        """Sent and received, since this reporter was made."""
        sent, received = self._peers.bytes_moved
        return sent - self._sent_before, received - self._received_before

    def stepped(self, round: int, loss: float) -> None:
        self.images += self._batch_images
        self.max_staleness = max(self.max_staleness, self._peers.staleness)
        now = time.perf_counter()
        if now - self._reported < REPORT_S and round < self._rounds:
            return
        self._reported = now
        emit(
            Progress(
                rank=self._peers.rank,
                round=round,
                rounds=self._rounds,
                epoch=-(-round * self._epochs // self._rounds),
                epochs=self._epochs,
                loss=loss,
                images_per_s=self.images / self.seconds,
                staleness=self._peers.staleness,
            )
        )


def endless(batches: Batches) -> Iterator[Batch]:
    epoch = 0
    while True:
        yield from batches.epoch(epoch)
        epoch += 1


def train(settings: Settings, peers: Peers) -> None:
    """Until the peers are past the last round: they count, since a strategy may let a late worker catch up."""
    digits = load(settings.data_dir)
    model = seeded_model(digits, settings.seed + peers.rank)  # rank 0's values are what everybody gets
    distributed, optimizer = peers.distribute(model, plain_optimizer(model, settings))
    batches = Batches(digits, settings, rank=peers.rank)
    rounds = settings.epochs * len(batches)
    schedule = cosine(optimizer, rounds)
    peers.meet("start")
    reporter = Reporter(peers, settings, rounds=rounds)
    stream = endless(batches)
    while (round := peers.round) <= rounds:
        optimizer.zero_grad()
        loss = backward(distributed, next(stream))
        optimizer.step()
        schedule.step()
        reporter.stepped(round, loss)
    seconds = reporter.seconds
    sent, received = reporter.bytes_moved
    peers.meet("end")
    peers.finish(model)
    if peers.rank == 0 and settings.weights_path is not None:
        save(model, settings.weights_path)
    emit(
        Finished(
            rank=peers.rank,
            images=reporter.images,
            seconds=seconds,
            bytes_pushed=sent,
            bytes_pulled=received,
            max_staleness=reporter.max_staleness,
            accuracy=accuracy(model, digits),
            test_images=len(digits.test_labels),
            dataset=digits.name,
        )
    )


def save(model: nn.Module, path: str) -> None:
    arrays: dict[str, Any] = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    np.savez(path, **arrays)


def main() -> None:
    torch.set_num_threads(1)
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    with STRATEGIES[settings.strategy](settings) as peers:
        train(settings, peers)


if __name__ == "__main__":
    main()
