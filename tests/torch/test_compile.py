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
from tests.torch.support import WIDTH, Odd, assert_same_bits, batches, deep

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


def compiled_step(model: nn.Module, optimizer: Optimizer) -> Callable[[torch.Tensor], None]:
    """A training step that is compiled whole."""

    @torch.compile(backend="aot_eager")
    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


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

        step = compiled_step(model, optimizer)
        for batch in batches(STEPS):
            step(batch)
        return model

    plain = trained(sgd)
    with psstore.connect("local://?shards=2") as store:
        on_store = trained(partial(stored, store=store, overlap=overlap))
        assert store.version == STEPS
    assert_same_bits(plain, on_store)


def test_hooks_that_send_are_left_out_of_a_compiled_training_step() -> None:
    torch._dynamo.reset()
    model = deep()
    with psstore.connect("local://") as store:
        optimizer = stored(model, store, overlap="backward")

        step = compiled_step(model, optimizer)
        for _ in range(STEPS):
            step(torch.ones(2, WIDTH))
        assert store.version == STEPS


class Likes(nn.Module):
    """Looks two tables up."""

    def __init__(self, store: psstore.Store) -> None:
        super().__init__()
        self.one = psstore.torch.Embedding("one", 4, store, lr=0.1, init="normal(0, 1)", padding_idx=3)
        self.bag = psstore.torch.EmbeddingBag("bag", 4, store, lr=0.1, init="normal(0, 1)", padding_idx=3)
        self.head = nn.Linear(4, 1, bias=False)
        nn.init.ones_(self.head.weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head((self.one(ids) + self.bag(ids.view(-1, 1).repeat(1, 2))).tanh())
        return out


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    return model(ids).square().sum()


@pytest.mark.parametrize("what", ["model", "step"])
def test_a_compiled_model_looks_tables_up_outside_of_its_graphs(what: str) -> None:
    """And compiles nothing anew in each step: there may be only so many graphs of one function."""
    from torch._dynamo.utils import counters

    def losses(*, compiles: bool) -> list[float]:
        torch._dynamo.reset()
        with psstore.connect("local://") as store:
            model = Likes(store)
            optimizer = stored(model, store, tables=[model.one, model.bag])
            called = torch.compile(model, backend="aot_eager") if compiles and what == "model" else model

            def step(ids: torch.Tensor) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(called, ids)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                return loss

            run = torch.compile(step, backend="aot_eager") if compiles and what == "step" else step
            found = [run(torch.arange(first, first + 3)).item() for first in range(4)]
            num_frames = counters["frames"]["total"]
            found += [run(torch.arange(first, first + 3)).item() for first in range(4, 12)]
            assert counters["frames"]["total"] - num_frames <= 2
            return found

    assert losses(compiles=True) == losses(compiles=False)
