"""The contestants of `gpu` that are a whole store whose shards live on the GPU, with a worker's arrays there, too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

import psstore
from bench.gpu_targets import OURS
from bench.gpu_timing import Bench, Launch
from bench.gpu_training import MakeOptimizer
from bench.processes import store_server
from psstore.config import Transport
from psstore.types import TensorSpec

PASSES = 28
"""Bytes that a round of SGD moves for each parameter: push and pull read 4 and write 4 each, and the step reads value
and gradient and writes the value."""


@dataclass(frozen=True)
class Home:
    """Where a store's one shard lives, and how its worker gets there."""

    on_host: bool = False
    """Else on the device of the worker's arrays."""
    transport: Transport | None = None
    """None: it is in this process."""

    @contextlib.contextmanager
    def store(self, bench: Bench) -> Iterator[psstore.Store]:
        device = "cpu" if self.on_host else bench.name
        with contextlib.ExitStack() as ends:
            if self.transport is None:
                yield ends.enter_context(psstore.connect(f"local://?device={device}"))
            else:
                url = ends.enter_context(store_server("unix", 1, options=["--device", device]))
                yield ends.enter_context(psstore.connect(url, rank=0, transport=self.transport))


SERVED = {
    OURS: Home(transport="auto"),
    "through pinned memory and a socket": Home(transport="unix"),
    "store on the host": Home(on_host=True, transport="auto"),
}
"""Of a store in another process."""

EMBEDDED = {OURS: Home(), "store on the host": Home(on_host=True)}


@contextlib.contextmanager
def named_stores(bench: Bench, homes: Mapping[str, Home]) -> Iterator[dict[str, psstore.Store]]:
    with contextlib.ExitStack() as ends:
        yield {name: ends.enter_context(home.store(bench)) for name, home in homes.items()}


def round_of(bench: Bench, store: psstore.Store, num_elems: int) -> Launch:
    """Push, commit, pull of one tensor, from and to the device's memory."""
    gradient, parameter = bench.random(num_elems, seed=0), bench.empty(num_elems)
    store.create_many([TensorSpec(name="w", shape=(num_elems,), rule="sgd")])

    def launch() -> None:
        store.push("w", gradient)
        store.commit({"lr": 1e-3})
        store.pull("w", out=parameter)

    return launch


def store_adamw(store: psstore.Store) -> MakeOptimizer:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        local = torch.optim.AdamW(model.parameters(), lr=3e-4)
        return psstore.torch.DistributedOptimizer(local, store, named_parameters=model.named_parameters())

    return make
