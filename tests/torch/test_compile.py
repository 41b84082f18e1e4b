"""A compiled model trains on a store as it does with the plain optimizer: as many graphs, no break, the same bits."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

import psstore
from tests.torch.support import Odd, assert_same_bits, batches

STEPS = 6

INDUCTOR_S = 400
"""Its C++ compiler takes its time on a busy machine."""

MakeOptimizer = Callable[[nn.Module], Optimizer]

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="inductor needs a C++ compiler"
)


@dataclass(frozen=True)
class Compiled:
    """What came of training a compiled model."""

    model: nn.Module
    num_graphs: int
    breaks: dict[str, int]


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


def stored(model: nn.Module, store: psstore.Store, **options: Any) -> Optimizer:
    return psstore.torch.DistributedOptimizer(sgd(model), store, named_parameters=model.named_parameters(), **options)


def train(make_optimizer: MakeOptimizer, backend: str, inputs: Iterable[torch.Tensor]) -> Compiled:
    from torch._dynamo.testing import CompileCounterWithBackend  # here: a second, which each of pytest's workers would
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = Odd()
    optimizer = make_optimizer(model)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter)
    for batch in inputs:
        optimizer.zero_grad()
        compiled(batch).square().mean().backward()
        optimizer.step()
    return Compiled(model, counter.frame_count, dict(counters["graph_break"]))


@pytest.mark.parametrize(
    ("backend", "overlap"),
    [
        ("aot_eager", "backward"),
        ("aot_eager", "none"),
        ("aot_eager", "eager"),
        pytest.param("inductor", "backward", marks=[needs_compiler, pytest.mark.long, pytest.mark.timeout(INDUCTOR_S)]),
    ],
)
def test_a_compiled_model_trains_as_with_the_plain_optimizer(backend: str, overlap: str) -> None:
    plain = train(sgd, backend, batches(STEPS))
    with psstore.connect("local://?shards=2") as store:
        on_store = train(partial(stored, store=store, overlap=overlap), backend, batches(STEPS))
    assert plain.num_graphs == on_store.num_graphs == 1
    assert plain.breaks == on_store.breaks == {}
    assert_same_bits(plain.model, on_store.model)


def test_a_change_of_shape_recompiles_no_more_often_than_with_the_plain_optimizer() -> None:
    shapes = [torch.ones(count, 5) for count in (6, 6, 4, 4, 6)]
    plain = train(sgd, "aot_eager", shapes)
    with psstore.connect("local://") as store:
        on_store = train(partial(stored, store=store), "aot_eager", shapes)
    assert on_store.num_graphs == plain.num_graphs > 1
    assert_same_bits(plain.model, on_store.model)


@pytest.mark.parametrize("overlap", ["backward", "none"])
def test_a_compiled_training_step_leaves_the_store_out_of_its_graphs(overlap: str) -> None:
    def trained(make_optimizer: MakeOptimizer) -> nn.Module:
        torch._dynamo.reset()
        model = Odd()
        optimizer = make_optimizer(model)

        @torch.compile(backend="aot_eager")
        def step(batch: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

        for batch in batches(STEPS):
            step(batch)
        return model

    plain = trained(sgd)
    with psstore.connect("local://?shards=2") as store:
        on_store = trained(partial(stored, store=store, overlap=overlap))
        assert store.version == STEPS
    assert_same_bits(plain, on_store)
