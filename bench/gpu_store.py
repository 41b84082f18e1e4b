"""The contestants of `gpu` that are a whole store whose shards live on the GPU, with a worker's arrays there, too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

import psstore
from bench.gpu_timing import Bench, Launch
from bench.gpu_training import MakeOptimizer
from bench.processes import store_server
from psstore.types import TensorSpec

PASSES = 28
"""Bytes that a round of SGD moves for each parameter: push and pull read 4 and write 4 each, and the step reads value
and gradient and writes the value."""


@contextlib.contextmanager
def store_in_another_process(bench: Bench) -> Iterator[psstore.Store]:
    """On the same device, by whichever way the client finds there."""
    with store_server("unix", 1, options=["--device", bench.name]) as url, psstore.connect(url, rank=0) as store:
        yield store


@contextlib.contextmanager
def embedded_store(bench: Bench) -> Iterator[psstore.Store]:
    with psstore.connect(f"local://?device={bench.name}") as store:
        yield store


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
