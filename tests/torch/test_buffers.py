"""A model's buffers are rank 0's on every worker, if they are named."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD

import psstore
from psstore.checkpoint.handed import pack_handed, unpack_handed
from psstore.errors import UsageError
from psstore.torch import DistributedOptimizer, worker_state
from tests.torch.support import in_threads, on_each_worker

STEPS = 4


class Normed(nn.Module):
    """Batch-norm statistics, a count, a constant mask, a half-precision and an empty buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("mask", torch.arange(5) % 2 == seed % 2)
        self.register_buffer("scale", torch.full((2,), 1.5 + seed, dtype=torch.bfloat16))
        self.register_buffer("nothing", torch.zeros(0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.norm(self.linear(inputs))
        return output


def wrap(model: nn.Module, store: psstore.Store, *, buffers: bool = True) -> DistributedOptimizer:
    return DistributedOptimizer(
        SGD(model.parameters(), lr=0.1),
        store,
        model.named_parameters(),
        named_buffers=model.named_buffers() if buffers else (),
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int = STEPS) -> None:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 3, generator=generator)).square().mean().backward()
        optimizer.step()


def assert_same_buffers(left: nn.Module, right: nn.Module) -> None:
    for (name, one), other in zip(left.named_buffers(), right.buffers(), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other), name


def test_buffers_are_rank_0s_from_the_start_and_after_each_step() -> None:
    models = [Normed(rank) for rank in range(3)]
    started = Normed(0)

    def work(store: psstore.Store, rank: int) -> None:
        optimizer = wrap(models[rank], store)
        assert_same_buffers(models[rank], started)
        store.barrier("all have looked")
        train(models[rank], optimizer, rank)

    on_each_worker(3, work, shards=2)
    assert models[0].norm.num_batches_tracked == STEPS
    for model in models[1:]:
        assert_same_buffers(models[0], model)


def test_buffers_are_what_they_are_without_a_store_on_rank_0() -> None:
    plain, stored = Normed(0), Normed(0)
    train(plain, SGD(plain.parameters(), lr=0.1), 0)
    with psstore.connect("local://") as store:
        train(stored, wrap(stored, store), 0)
    assert_same_buffers(plain, stored)


@pytest.mark.filterwarnings("ignore:the store has trained:UserWarning")
def test_buffers_go_back_to_what_a_session_has_handed_in() -> None:
    """Whatever the store has of the step that is taken again."""
    model = Normed(0)
    with psstore.connect("local://") as store:
        optimizer = wrap(model, store)
        train(model, optimizer, rank=0)
        handed, then = pack_handed(worker_state.collect(optimizer, {})), deepcopy(model)
        model(torch.randn(8, 3))
        store.push("norm.running_var", model.norm.running_var)
        optimizer.reattach()
        worker_state.put_back(unpack_handed(handed), optimizer, {})
        assert_same_buffers(model, then)


def test_buffers_stay_local_unless_they_are_named() -> None:
    models = [Normed(rank) for rank in range(2)]

    def work(store: psstore.Store, rank: int) -> None:
        train(models[rank], wrap(models[rank], store, buffers=False), rank)
        assert "norm.running_mean" not in store.keys()

    on_each_worker(2, work)
    means = [dict(model.named_buffers())["norm.running_mean"] for model in models]
    assert not torch.equal(*means)


def test_what_does_not_change_does_not_travel() -> None:
    """Statistics and their count do, 48 bytes; mask and scale are sent once."""
    models = [Normed(rank) for rank in range(2)]
    gradients = sum(parameter.nbytes for parameter in models[0].parameters())
    with psstore.LocalStore(workers=2) as local, local.connect(rank=0) as first, local.connect(rank=1) as second:
        stores = (first, second)
        made: list[DistributedOptimizer] = [None, None]  # type: ignore[list-item]

        def make(rank: int) -> None:
            made[rank] = wrap(models[rank], stores[rank])

        in_threads([partial(make, rank) for rank in range(2)])
        pushed, pulled = first.bytes_pushed, second.bytes_pulled
        in_threads([partial(train, models[rank], made[rank], rank, 2) for rank in range(2)])
        assert first.bytes_pushed - pushed == 2 * (gradients + 48)
        assert second.bytes_pulled - pulled <= 2 * (gradients + 48)


def test_complex_buffers_are_refused_by_name() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("spectrum", torch.zeros(2, dtype=torch.complex64))
    with psstore.connect("local://") as store, pytest.raises(UsageError, match="buffer 'spectrum' is complex64"):
        wrap(model, store)


@pytest.mark.parametrize("compression", [None, "push=int8"], ids=["whole", "int8"])
def test_buffers_go_with_the_rounds_where_models_are_averaged(compression: str | None) -> None:
    models = [Normed(rank) for rank in range(2)]

    def work(store: psstore.Store, rank: int) -> None:
        model = models[rank]
        optimizer = DistributedOptimizer(
            SGD(model.parameters(), lr=0.1),
            store,
            model.named_parameters(),
            named_buffers=model.named_buffers(),
            mode="average",
            every=STEPS,
            compression=compression,
        )
        pushed = store.bytes_pushed
        train(model, optimizer, rank, STEPS - 1)
        assert store.bytes_pushed == pushed
        train(model, optimizer, rank, 1)

    on_each_worker(2, work)
    assert_same_buffers(*models)
