"""prefetch: rows that are pulled ahead are those that the lookup would have pulled, bit for bit."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import psstore
from psstore.client.store import Store
from psstore.errors import BadArgument, UsageError
from psstore.torch import DistributedOptimizer, Embedding, EmbeddingBag
from tests.support.cluster import at_once
from tests.support.server_process import eventually
from tests.torch.test_embedding import DIM, Model, batch, distributed, first_rows, loss_of

STEPS = 8

Trained = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture
def pulls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Each pull of rows: the name of its thread, and the number of ids."""
    made: list[tuple[str, int]] = []
    pull = Store.pull_rows

    def noting(self: Store, name: str, ids: torch.Tensor, **options: Any) -> Any:
        made.append((threading.current_thread().name, len(ids)))
        return pull(self, name, ids, **options)

    monkeypatch.setattr(Store, "pull_rows", noting)
    return made


def ahead(made: list[tuple[str, int]]) -> list[int]:
    return [count for thread, count in made if thread.startswith("psstore-prefetch")]


def on_demand(made: list[tuple[str, int]]) -> list[int]:
    return [count for thread, count in made if not thread.startswith("psstore-prefetch")]


def train(
    server: psstore.LocalStore, rank: int, *, is_ahead: bool, max_norm: float | None, cache_bytes: int | None
) -> Trained:
    """The rows and the layer after some steps of batches that share most of their ids, also between workers."""
    with server.connect(rank=rank) as store:
        items = Embedding("items", DIM, store, rule="adagrad", init="normal(0, 0.5)", cache_bytes=cache_bytes, lr=0.1)
        model = Model(items)
        optimizer = distributed(model, items, store, max_norm=max_norm)
        for step in range(STEPS):
            loss = loss_of(model, step, rank)
            if is_ahead:
                for ids in batch(step + 1, rank)[:2]:
                    items.prefetch(ids)
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        store.barrier("trained")
        return first_rows(store, "items"), model.head.weight.detach().clone()


@pytest.mark.parametrize("max_norm", [None, 0.1], ids=["plain", "clipped"])
def test_workers_train_to_the_same_bits_with_rows_that_are_pulled_ahead(
    pulls: list[tuple[str, int]], max_norm: float | None
) -> None:
    results: list[Trained] = []
    for is_ahead, cache_bytes in ((False, None), (True, None), (True, 1 << 12)):
        pulls.clear()
        with psstore.LocalStore(shards=2, workers=2) as server:
            work = partial(train, server, is_ahead=is_ahead, max_norm=max_norm, cache_bytes=cache_bytes)
            results += at_once(*[partial(work, rank) for rank in range(2)])
        assert len(on_demand(pulls)) == 2 * (2 * (1 if is_ahead else STEPS) + 1)
        times = 2 if cache_bytes else 1  # before the decision, and after it
        assert len(ahead(pulls)) >= (times * 2 * 2 * (STEPS - 1) if is_ahead else 0)  # the last are taken by nobody
    for rows, head in results[1:]:
        assert torch.equal(rows, results[0][0])
        assert torch.equal(head, results[0][1])


def sent_bytes(store: Store) -> int:
    return sum(int(one["sent_bytes"]) for one in store.stats())


@pytest.fixture
def trained(store: Store) -> tuple[EmbeddingBag, DistributedOptimizer]:
    items = EmbeddingBag("items", 2, store, mode="sum", rule="sgd", init="zeros", lr=1.0)
    layer = nn.Linear(1, 1)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(layer.parameters(), lr=1.0), store, layer.named_parameters(), tables=[items]
    )
    return items, optimizer


@torch.enable_grad()
def step(items: EmbeddingBag, optimizer: DistributedOptimizer) -> None:
    items(torch.tensor([[1, 2]])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_what_was_pulled_ahead_is_taken_once_and_dropped_by_the_next_step(
    trained: tuple[EmbeddingBag, DistributedOptimizer], pulls: list[tuple[str, int]]
) -> None:
    items, _ = trained
    ids = torch.tensor([[2, 3], [3, 4]])
    items.prefetch(ids)
    step(*trained)
    with torch.no_grad():
        assert items(torch.tensor([[2]])).tolist() == [[-1.0, -1.0]]  # of others: it takes nothing away
        before = len(on_demand(pulls))
        assert items(ids).tolist() == [[-1.0, -1.0], [0.0, 0.0]]
        assert len(on_demand(pulls)) == before
        items(ids)
        assert len(on_demand(pulls)) == before + 1
        items.prefetch(ids)
        step(*trained)
        assert eventually(lambda: ahead(pulls) == [4, 4])  # else it may be dropped before it has begun
        step(*trained)
        assert items(ids).tolist() == [[-3.0, -3.0], [0.0, 0.0]]


def test_a_cache_has_what_is_announced_before_the_step_and_pulls_again_what_has_changed(
    store: Store, pulls: list[tuple[str, int]]
) -> None:
    items = EmbeddingBag("items", 2, store, mode="sum", rule="sgd", init="zeros", cache_bytes=1 << 20, lr=1.0)
    layer = nn.Linear(1, 1)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(layer.parameters(), lr=1.0), store, layer.named_parameters(), tables=[items]
    )
    ids = torch.arange(1000)[None]
    items.prefetch(ids)
    assert eventually(lambda: sent_bytes(store) >= 1000 * 8)
    step(items, optimizer)
    with torch.no_grad():
        assert items(ids).tolist() == [[-2.0, -2.0]]
    assert ahead(pulls) == [1000, 1000]
    assert sent_bytes(store) < 1.5 * 1000 * 8


def test_ids_that_are_changed_after_they_were_announced_are_looked_up_as_they_are(
    trained: tuple[EmbeddingBag, DistributedOptimizer],
) -> None:
    items, _ = trained
    ids = torch.tensor([[7]])
    items.prefetch(ids)
    step(*trained)
    ids[0, 0] = 1
    assert items(ids).tolist() == [[-1.0, -1.0]]


def test_what_can_not_be_pulled_ahead_is_said(trained: tuple[EmbeddingBag, DistributedOptimizer]) -> None:
    items, _ = trained
    with pytest.raises(UsageError, match="integers"):
        items.prefetch(torch.tensor([0.5]))
    ids = torch.tensor([[-1]])
    items.prefetch(ids)
    step(*trained)
    with pytest.raises(BadArgument, match="negative"):
        items(ids)
