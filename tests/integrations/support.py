"""What the tests of frameworks train: a model with dropout on shuffled rows, each of which draws a random number as it
is made; and a life of it on a store that begins where the last one ended."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import psstore
from psstore.checkpoint.place import open_place
from psstore.client.store import Store
from psstore.torch import DistributedOptimizer
from tests.support.cluster import PATIENCE_S
from tests.support.server_process import StoreProcess, eventually

NUM_ROWS = 22
BATCH = 4
BATCHES = 6
"""In an epoch; the last one has two rows."""


class Rows(Dataset[tuple[int, torch.Tensor]]):
    """Rows of noise. `augmented`: drawn as they are asked for."""

    def __init__(self, *, augmented: bool) -> None:
        self._rows = torch.randn(NUM_ROWS, 5, generator=torch.Generator().manual_seed(1))
        self._augmented = augmented

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor]:
        return number, self._rows[number] * (random.random() + torch.rand(()) if self._augmented else 1.0)

    def __len__(self) -> int:
        return NUM_ROWS


class Stream(IterableDataset[tuple[int, torch.Tensor]]):
    """Rows in an order that is drawn as it begins; how many there are it does not say."""

    def __init__(self) -> None:
        self._rows = Rows(augmented=True)

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        for number in torch.randperm(NUM_ROWS).tolist():
            yield self._rows[number]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(0.3), nn.Linear(7, 1))


def loss_of(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    error: torch.Tensor = module(rows).squeeze(1) - rows.sum(1)
    return error.square().mean() * random.random()


def on(store: Store, module: nn.Module) -> DistributedOptimizer:
    plain = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, foreach=False)
    return DistributedOptimizer(plain, store, module.named_parameters())


def bytes_of(module: nn.Module) -> bytes:
    return b"".join(parameter.detach().numpy().tobytes() for parameter in module.parameters())


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


class Life(NamedTuple):
    """What a training has come to."""

    weights: bytes
    rates: list[float]
    seen: list[Any]
    """Batches that it was trained with: first of each the version at which it was."""
    version: int
    random: list[float]


def life(module: nn.Module, optimizer: DistributedOptimizer, seen: list[Any]) -> Life:
    rates = [group["lr"] for group in optimizer.param_groups]
    drawn = [random.random(), float(torch.rand(())), float(np.random.rand())]
    return Life(bytes_of(module), rates, seen, optimizer.store.version, drawn)


Train = Callable[[Store, int | None], Life]
"""Trains to that version; None: as long as the framework says."""


def lives(train: Train, place: Path, *ends: int | None, num_shards: int = 1) -> list[Life]:
    """Trains to each of these versions in turn, each time in a store that is restored into one more shard."""
    found = []
    for number, end in enumerate(ends):
        flags = ("--checkpoint", str(place), "--restore", "auto", "--checkpoint-every", "1000000")
        with (
            StoreProcess("--shards", str(num_shards + number), *flags) as process,
            psstore.connect(process.url, wait_s=PATIENCE_S) as store,
        ):
            seed(5 if number == 0 else 1000 + number)
            found.append(train(store, end))
    return found


class Witness:
    """Copies a place as soon as a checkpoint of a running training is in it: what is there if everything is killed."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self.copy = place.with_name("copy")
        self.version: int | None = None

    def look(self, version: int) -> None:
        """Called in the middle of each step. Waits a little: a checkpoint is written beside training, which takes few
        steps, and wants some of them."""
        if version > 1 and self.version is None and eventually(self._has_one, LOOK_S):
            shutil.copytree(self._place, self.copy)
            self.version = self._versions()[-1]

    def _has_one(self) -> bool:
        return bool(self._versions())

    def _versions(self) -> list[int]:
        place = open_place(str(self._place)).place
        return [version for version in place.folders() if place.has(version)]


LOOK_S = 1.0


def killed_and_whole(train: Callable[[Store, int | None, Witness | None], Life], folder: Path) -> tuple[Life, Life]:
    """One that goes on from a checkpoint that another has written on its way; and that other one, from there on."""
    witness = Witness(folder / "whole")
    (whole,) = lives(lambda store, end: train(store, end, witness), folder / "whole", None)
    assert witness.version is not None, "no checkpoint was written beside training"
    (rest,) = lives(lambda store, end: train(store, end, None), witness.copy, None, num_shards=3)
    return rest, whole._replace(seen=[batch for batch in whole.seen if batch[0] >= witness.version])


def assert_same_training(parted: list[Life], whole: Life) -> None:
    """A training in several lives, and the same in one."""
    assert [batch for one in parted for batch in one.seen] == whole.seen
    assert parted[-1]._replace(seen=[]) == whole._replace(seen=[])
