"""What codecs do to training: the demo's network on handwritten digits, with each, and the bytes that travel.

    python -m bench.compression [--quick] [--seeds N] [--epochs N] [--json FILE] [--plot FILE.png]

Two workers as threads of this process; the bytes are those that a network would carry. No times: what a slow link makes
of fewer bytes is in bench.links.
"""

from __future__ import annotations

import argparse
import statistics
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

import psstore
from bench.command import Subject, run
from bench.machine import machine
from bench.report import Chart, Report, Table
from psstore.cli.demo.data import Digits, load
from psstore.cli.demo.messages import Settings
from psstore.cli.demo.worker import Batches, accuracy, backward, cosine, plain_optimizer, seeded_model
from psstore.torch import DistributedOptimizer

NUM_WORKERS = 2

SEEDS, EPOCHS = 3, 10

PLAIN = "none"

FORGETFUL = "topk:0.01, nothing kept back"
"""What error feedback is good for: what it loses is lost."""

CHOICES: Mapping[str, str] = {
    PLAIN: "none",
    "bf16": "bf16",
    "int8": "int8",
    "sign": "sign",
    "push=sign,pull=bf16": "push=sign,pull=bf16",
    "push=topk:0.01,pull=int8": "push=topk:0.01,pull=int8",
    FORGETFUL: "topk:0.01",
}
"""Row -> what `compression=` is."""


@dataclass(frozen=True)
class Outcome:
    """One training."""

    losses: Sequence[float]
    """Mean over each epoch, of rank 0's batches."""
    accuracy: float
    """On the test images, of the final parameters."""
    pushed_bytes: float
    """By one worker, in one step."""
    pulled_bytes: float


class Worker(threading.Thread):
    """One of a training's."""

    def __init__(self, server: psstore.LocalStore, digits: Digits, settings: Settings, row: str, rank: int) -> None:
        super().__init__(daemon=True)
        self.outcome: Outcome | Exception = RuntimeError("this worker has not ended")
        # Here, one after the other: threads that make models share the numbers that torch draws.
        self._of = server, digits, settings, row, rank, seeded_model(digits, settings.seed)

    def run(self) -> None:
        try:
            self.outcome = train(*self._of)
        except Exception as error:
            self.outcome = error


def train(
    server: psstore.LocalStore, digits: Digits, settings: Settings, row: str, rank: int, model: nn.Module
) -> Outcome:
    with server.connect(rank=rank) as store:
        names = [name for name, _ in model.named_parameters()]
        plain = plain_optimizer(model, settings)
        optimizer = DistributedOptimizer(
            plain, store, named_parameters=model.named_parameters(), compression=CHOICES[row]
        )
        batches = Batches(digits, settings, rank=rank)
        num_steps = settings.epochs * len(batches)
        schedule = cosine(optimizer, num_steps)
        pushed, pulled = store.bytes_pushed, store.bytes_pulled
        losses = []
        for epoch in range(settings.epochs):
            found = []
            for batch in batches.epoch(epoch):
                optimizer.zero_grad()
                found.append(backward(model, batch))
                optimizer.step()
                schedule.step()
                if row == FORGETFUL:
                    store.set_residuals(dict.fromkeys(names))
            losses.append(statistics.fmean(found))
        sent, received = store.bytes_pushed - pushed, store.bytes_pulled - pulled
        return Outcome(losses, accuracy(model, digits), sent / num_steps, received / num_steps)


def train_together(digits: Digits, settings: Settings, row: str) -> Outcome:
    """Rank 0's."""
    with psstore.LocalStore(workers=NUM_WORKERS) as server:
        workers = [Worker(server, digits, settings, row, rank) for rank in range(NUM_WORKERS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    for worker in workers:
        if isinstance(worker.outcome, Exception):
            raise worker.outcome
    outcome = workers[0].outcome
    assert isinstance(outcome, Outcome)
    return outcome


def measure(chosen: argparse.Namespace) -> Report:
    torch.set_num_threads(1)
    digits = load(None)
    num_seeds, epochs = chosen.seeds or (1 if chosen.quick else SEEDS), chosen.epochs or (2 if chosen.quick else EPOCHS)
    found = {
        row: [
            train_together(digits, Settings(num_workers=NUM_WORKERS, epochs=epochs, seed=seed), row)
            for seed in range(num_seeds)
        ]
        for row in CHOICES
    }
    return Report(
        subject="compression",
        about=(
            f"The network of `psstore demo` (150,000 parameters) on scikit-learn's digits: {epochs} epochs,"
            f" {NUM_WORKERS} workers, synchronous, seeds 0 to {num_seeds - 1}. Loss: mean of the last epoch's batches."
            " Bytes: of one worker in one step, small parameters, which travel as they are, included."
        ),
        tables=[_table(found)],
        charts=[_curves(found)],
        machine=machine(),
    )


def _table(found: Mapping[str, Sequence[Outcome]]) -> Table:
    before = found[PLAIN][0]
    rows = [
        [
            f"`{row}`" if row != FORGETFUL else f"`{CHOICES[row]}`, nothing kept back",
            _spread([one.losses[-1] for one in outcomes], ".3f"),
            _spread([100 * one.accuracy for one in outcomes], ".1f"),
            f"{outcomes[0].pushed_bytes:,.0f}",
            f"{before.pushed_bytes / outcomes[0].pushed_bytes:.1f}",
            f"{outcomes[0].pulled_bytes:,.0f}",
            f"{before.pulled_bytes / outcomes[0].pulled_bytes:.1f}",
        ]
        for row, outcomes in found.items()
    ]
    headers = ("compression", "final loss", "test accuracy, %", "pushed, bytes", "ratio", "pulled, bytes", "ratio")
    return Table("Loss, accuracy and bytes", headers, rows)


def _spread(values: Sequence[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return f"{format(statistics.fmean(values), form)} ({low}–{high})"


def _curves(found: Mapping[str, Sequence[Outcome]]) -> Chart:
    series = {
        row: {
            str(epoch + 1): statistics.fmean(losses)
            for epoch, losses in enumerate(zip(*(one.losses for one in outcomes), strict=True))
        }
        for row, outcomes in found.items()
    }
    return Chart("loss", "Training loss, mean of the seeds", "cross-entropy", series, kind="lines", x_axis="epoch")


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, metavar="N", help=f"trainings per row (default: {SEEDS})")
    parser.add_argument("--epochs", type=int, metavar="N", help=f"of each training (default: {EPOCHS})")


SUBJECT = Subject("compression", __doc__.splitlines()[0], measure, _add_options, isolated=False)

if __name__ == "__main__":
    run(SUBJECT)
