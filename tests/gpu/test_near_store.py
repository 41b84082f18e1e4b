"""A worker and a shard, in another process or in its own, pass gradients and values on the GPU that both have, byte by
byte."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from bench.processes import store_server

import psstore
from psstore.client.device import arrays as device_arrays
from psstore.client.store import Store
from tests.gpu.support import on_a_gpu

pytestmark = on_a_gpu

ELEMS = 3_000_001
NUM_ROUNDS = 4


@pytest.fixture(params=["another process", "this process"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    if request.param == "this process":
        with psstore.connect("local://?device=cuda:0") as store:
            yield store
        return
    with (
        store_server("unix", 1, options=["--device", "cuda:0"]) as url,
        psstore.connect(url, rank=0) as store,
    ):
        yield store


def pinned_bytes(store: Store, index: int) -> int:
    """What went through the host."""
    transfers, device = store._operations.context.transfers, device_arrays.device_at(index)
    return transfers.out_of(device).pinned_bytes + transfers.into(device).pinned_bytes


def train(store: Store, device: str) -> torch.Tensor:
    torch.manual_seed(0)
    store.create("w", torch.randn(ELEMS), rule="adam")
    out = torch.empty(ELEMS, device=device)
    for _ in range(NUM_ROUNDS):
        store.push("w", torch.randn(ELEMS).to(device))
        store.commit({"lr": 0.01})
        store.pull("w", out=out)
    return out.cpu()


def in_main_memory() -> torch.Tensor:
    with psstore.connect("local://") as store:
        return train(store, "cpu")


def test_steps_are_those_of_main_memory_and_nothing_goes_through_the_host(store: Store) -> None:
    assert torch.equal(train(store, "cuda:0"), in_main_memory())
    assert pinned_bytes(store, 0) == 0


def test_a_value_that_is_pulled_is_read_before_it_changes(store: Store) -> None:
    store.create("w", torch.zeros(ELEMS), rule="add")
    out = torch.full((ELEMS,), torch.nan, device="cuda:0")
    for i in range(NUM_ROUNDS):
        store.pull("w", out=out)
        store.push("w", torch.ones(ELEMS))
        assert bool((out == i).all())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_gpu_of_the_machine_goes_through_the_host(store: Store) -> None:
    assert torch.equal(train(store, "cuda:1"), in_main_memory())
    assert pinned_bytes(store, 1) > 0
