"""`ResumableLoader`: an epoch that is taken up gives what it would have given, and leaves the random states as they
would have been."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler

from psstore.torch import ResumableLoader
from psstore.torch.worker_state import host_random, put_back_host_random

NUM_ROWS = 22
BATCH = 4
NUM_BATCHES = 6


class Rows(Dataset[torch.Tensor]):
    """Numbers, each with what an augmentation draws from every random state of the host."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __getitem__(self, row: int) -> torch.Tensor:
        self.asked.append(row)
        return torch.tensor([row, torch.rand(()), random.random(), np.random.rand()])

    def __len__(self) -> int:
        return NUM_ROWS


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for row in range(NUM_ROWS):
            yield torch.tensor([row, torch.rand(())])


class Plain(Dataset[int]):
    """Numbers, for loaders with processes: what these draw is not taken up."""

    def __getitem__(self, row: int) -> int:
        return row

    def __len__(self) -> int:
        return NUM_ROWS


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


LOADERS: dict[str, Callable[[], Iterable[Any]]] = {
    "in order": lambda: DataLoader(Rows(), BATCH),
    "shuffled": lambda: DataLoader(Rows(), BATCH, shuffle=True),
    "shuffled by its generator": lambda: DataLoader(Rows(), BATCH, shuffle=True, generator=seeded()),
    "a sampler's generator": lambda: DataLoader(Rows(), BATCH, sampler=RandomSampler(Rows(), generator=seeded())),
    "weighted": lambda: DataLoader(Rows(), BATCH, sampler=WeightedRandomSampler(range(1, 1 + NUM_ROWS), NUM_ROWS)),
    "stream": lambda: DataLoader(Stream(), BATCH),
    "without batches": lambda: DataLoader(Rows(), None, shuffle=True),
    "processes": lambda: DataLoader(Plain(), BATCH, shuffle=True, num_workers=1),
    "no loader": lambda: [torch.full((2,), one) for one in range(NUM_BATCHES)],
}


def endless(batches: ResumableLoader) -> Iterator[Any]:
    return itertools.chain.from_iterable(itertools.repeat(batches))


def taken(batches: Iterator[Any], count: int) -> list[Any]:
    """So many batches, and a number drawn after each, as by a model's dropout."""
    return [(next(batches), torch.rand(()), random.random()) for _ in range(count)]


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("cut", [0, 1, 4, NUM_BATCHES, NUM_BATCHES + 3])
def test_a_loader_that_is_taken_up_goes_on_as_if_it_had_never_ended(kind: str, cut: int) -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    first = ResumableLoader(LOADERS[kind]())
    stream = endless(first)
    taken(stream, cut)
    state, randoms = first.state_dict(), host_random()
    expected = taken(stream, 2 * NUM_BATCHES)

    torch.manual_seed(99)
    again = ResumableLoader(LOADERS[kind]())
    again.load_state_dict(state)
    assert same(list(again.state_dict()), list(state)), "what is not begun yet can be saved again"
    put_back_host_random(randoms)
    assert same(taken(endless(again), 2 * NUM_BATCHES), expected)


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("cut", [0, 1, 4, NUM_BATCHES, NUM_BATCHES + 3])
@pytest.mark.parametrize("further", [1, NUM_BATCHES])
def test_an_epoch_under_way_goes_where_its_loader_is_placed(kind: str, cut: int, further: int) -> None:
    """As when a store went back to a checkpoint: the loop goes on with the iterator that it has."""
    batches = ResumableLoader(LOADERS[kind]())
    stream = endless(batches)
    taken(stream, cut)
    state, randoms = batches.state_dict(), host_random()
    expected = taken(stream, NUM_BATCHES)
    taken(stream, further)
    batches.load_state_dict(state)
    put_back_host_random(randoms)
    assert same(taken(stream, NUM_BATCHES), expected)


@pytest.mark.parametrize("kind", ["shuffled", "stream"])
def test_what_was_fetched_ahead_is_fetched_again(kind: str) -> None:
    first = ResumableLoader(LOADERS[kind]())
    stream = iter(first)
    given = [batch for batch, *_ in taken(stream, 5)]
    for num_unused in (1, 2):
        again = ResumableLoader(LOADERS[kind]())
        again.load_state_dict(first.state_dict(num_unused=num_unused))
        torch.manual_seed(99)
        assert same([one for one, _ in zip(again, range(num_unused), strict=False)], given[-num_unused:])


def test_batches_that_were_used_are_not_fetched() -> None:
    first = ResumableLoader(DataLoader(Rows(), BATCH, shuffle=True))
    taken(iter(first), 4)
    rows = Rows()
    again = ResumableLoader(DataLoader(rows, BATCH, shuffle=True))
    again.load_state_dict(first.state_dict())
    assert len(list(again)) == 2
    assert len(rows.asked) == NUM_ROWS - 4 * BATCH


def test_an_epoch_may_begin_anew_instead() -> None:
    first = ResumableLoader(DataLoader(Rows(), BATCH))
    taken(iter(first), 4)
    again = ResumableLoader(DataLoader(Rows(), BATCH))
    again.load_state_dict(first.state_dict())
    again.begin_anew()
    assert len(list(again)) == NUM_BATCHES


def test_it_looks_like_the_loader() -> None:
    loader = DataLoader(Rows(), BATCH)
    assert len(ResumableLoader(loader)) == len(loader)
    assert ResumableLoader(loader).sampler is loader.sampler
