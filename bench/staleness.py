"""What stale gradients cost a training in mode async, and what compensating them (DC-ASGD) gives back.

    python -m bench.staleness [--quick] [--json FILE]

A small network learns handwritten digits, plain SGD, by workers of a store in this process. In async they take turns by
a clock that is drawn from a seed, each as long as the others but for a fifth, so that a gradient is stale by one step
of each of the others, and the same seed gives the same figures: nothing is measured that a machine could disturb. Axes:
learning rate, and λ of the compensation; beside them one worker alone, whose gradients are never stale, and mode sync,
which steps with the mean of all workers. All take as many gradients of as many samples: sync takes fewer steps. The
paper's adaptive form, in which λ is divided by the root of a running mean of each element's squares, is none that the
store has: whoever's turn it is looks at the store's values, which nobody else changes then, and makes its gradient up.
"""

from __future__ import annotations

import argparse
import heapq
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from bench.command import Subject, run
from bench.machine import machine
from bench.report import DIVERGES, Chart, Report, Table
from psstore.cli.demo.data import Digits, scikit_learn_digits
from psstore.client.local import LocalStore
from psstore.torch import DistributedOptimizer

WORKERS = 16
BATCH = 32
GRADIENTS = 1600
JITTER = 0.2
RATES = (0.05, 0.1, 0.15, 0.2, 0.4)
STRENGTHS = (0.0, 1.0, 3.0, 10.0, 30.0)
ADAPTIVE = (1.0, 2.0, 4.0)
"""λ of the adaptive form."""

DECAY, EPSILON = 0.95, 1e-7
"""Of the adaptive form's mean squares, and what keeps their root from being zero."""

OF_NOTHING = math.log(10)
"""The loss of all ten digits being equally likely."""


@dataclass(frozen=True)
class Way:
    """Who trains."""

    mode: str
    workers: int
    strength: float = 0.0
    is_adaptive: bool = False


WAYS: Mapping[str, Way] = {
    "one worker": Way("sync", 1),
    "sync": Way("sync", WORKERS),
    **{f"async, λ = {strength:g}": Way("async", WORKERS, strength) for strength in STRENGTHS},
    **{f"adaptive, λ = {strength:g}": Way("async", WORKERS, strength, is_adaptive=True) for strength in ADAPTIVE},
}

Squares = dict[str, torch.Tensor]
"""Running mean squares of each tensor's gradients, of all workers."""


def loss_of(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(images), labels)


class Worker:
    """Takes gradients of batches of its own, at what it pulled after the last one."""

    def __init__(
        self, digits: Digits, local: LocalStore, way: Way, squares: Squares, *, rank: int, rate: float, seed: int
    ) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10))
        self.digits = digits
        self.store = local.connect(rank=rank)
        self._random = torch.Generator().manual_seed(1000 * seed + rank)
        self._way, self._squares = way, squares
        options = {} if way.mode == "sync" or way.is_adaptive else {"compensation": way.strength}
        groups = [{"params": list(self.model.parameters()), **options}]
        self._optimizer = DistributedOptimizer(
            torch.optim.SGD(groups, lr=rate), self.store, named_parameters=self.model.named_parameters(), overlap="none"
        )

    def step(self) -> None:
        self._optimizer.zero_grad()
        images, labels = self.digits.train_images, self.digits.train_labels
        chosen = torch.randint(len(labels), (BATCH,), generator=self._random)
        torch.autograd.backward(loss_of(self.model, images[chosen], labels[chosen]))
        if self._way.is_adaptive:
            self._compensate()
        self._optimizer.step()

    @torch.no_grad()
    def _compensate(self) -> None:
        """As DC-ASGD-a does."""
        for name, parameter in self.model.named_parameters():
            gradient = parameter.grad
            assert gradient is not None
            squares = self._squares.setdefault(name, torch.zeros_like(gradient))
            squares.mul_(DECAY).addcmul_(gradient, gradient, value=1.0 - DECAY)
            moved = torch.from_numpy(self.store.pull(name)) - parameter
            gradient.add_(self._way.strength * gradient.square() * moved / (squares + EPSILON).sqrt())

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()


def turns(workers: int, gradients: int, seed: int) -> Iterator[int]:
    """Whose gradient is next."""
    random = np.random.default_rng(seed)
    due = [(random.uniform(), rank) for rank in range(workers)]
    heapq.heapify(due)
    for _ in range(gradients):
        now, rank = heapq.heappop(due)
        yield rank
        heapq.heappush(due, (now + 1.0 + random.uniform(-JITTER, JITTER), rank))


def final_loss(digits: Digits, way: Way, *, rate: float, seed: int, gradients: int) -> float:
    """On samples that nobody trains on; not finite where it diverges."""
    with LocalStore(1, workers=way.workers, mode=way.mode) as local, ExitStack() as ends:
        squares: Squares = {}
        made = [Worker(digits, local, way, squares, rank=rank, rate=rate, seed=seed) for rank in range(way.workers)]
        for worker in made:
            ends.callback(worker.store.close)
        if way.mode == "sync":
            threads = [
                threading.Thread(target=worker.steps, args=(gradients // way.workers,), daemon=True) for worker in made
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            last = made[0]
        else:
            for rank in turns(way.workers, gradients, seed):
                last = made[rank]
                last.step()
        with torch.no_grad():
            return float(loss_of(last.model, digits.test_images, digits.test_labels))


def staleness(chosen: argparse.Namespace) -> Report:
    torch.set_num_threads(1)
    digits = scikit_learn_digits()
    seeds, gradients = (range(1), 160) if chosen.quick else (range(3), GRADIENTS)
    losses = {
        f"{rate:g}": {
            name: [final_loss(digits, way, rate=rate, seed=seed, gradients=gradients) for seed in seeds]
            for name, way in WAYS.items()
        }
        for rate in RATES
    }
    return Report(
        subject="staleness",
        about=f"A network of 3,610 weights on digits, {gradients} gradients of {BATCH} samples each, {WORKERS} workers"
        " but for the one alone: the loss on samples that nobody trains on, by learning rate; that of knowing nothing"
        " is 2.3.",
        tables=[
            Table(
                f"loss after {gradients} gradients, median of {len(seeds)}",
                ("lr", *WAYS),
                [[rate, *(_cell(of[name]) for name in WAYS)] for rate, of in losses.items()],
            )
        ],
        charts=[_curves(losses)],
        figures=[{"seeds": len(seeds), "gradients": gradients, "losses": losses}],
        machine=machine("torch"),
    )


def _curves(losses: Mapping[str, Mapping[str, list[float]]]) -> Chart:
    """A line for each way that a store has; where it diverges, at the loss of knowing nothing."""
    series = {
        name: {rate: float(np.nanmin([np.median(of[name]), OF_NOTHING])) for rate, of in losses.items()}
        for name, way in WAYS.items()
        if not way.is_adaptive
    }
    title = "Loss by learning rate; in async gradients are 15 steps old"
    return Chart("", title, "loss", series, kind="lines", x_axis="learning rate")


def _cell(losses: list[float]) -> float | str:
    median = float(np.median(losses))
    return median if median < OF_NOTHING else DIVERGES


SUBJECT = Subject("staleness", __doc__.splitlines()[0], staleness, isolated=False)

if __name__ == "__main__":
    run(SUBJECT)
