"""Several backward passes to a step, and steps that fail and are taken again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD

import psstore
from psstore.errors import DeadlineExceeded
from psstore.torch import DistributedOptimizer
from psstore.torch.training import Overlap
from tests.torch.support import (
    WIDTH,
    Odd,
    assert_same_bits,
    backward,
    batches,
    deep,
    distributed,
    in_threads,
    num_bytes,
    on_each_worker,
)

MICRO_BATCHES = 3
STEPS = 4

MOMENTUM = partial(SGD, lr=0.05, momentum=0.9, foreach=False)


def accumulate(model: nn.Module, *, but_last: AbstractContextManager[None], set_to_none: bool = True) -> None:
    """One step's backward passes."""
    model.zero_grad(set_to_none)
    with but_last:
        for _ in range(MICRO_BATCHES - 1):
            model(torch.randn(2, WIDTH)).square().mean().backward()
    model(torch.randn(2, WIDTH)).square().mean().backward()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("silent", [True, False], ids=["no_sync", "without no_sync"])
def test_accumulated_gradients_give_the_same_bits_as_plain_torch(
    store: psstore.Store, silent: bool, set_to_none: bool
) -> None:
    plain, stored = deep(), deep()
    inner, outer = MOMENTUM(plain.parameters()), distributed(stored, store, MOMENTUM)
    for model, optimizer in ((plain, inner), (stored, outer)):
        torch.manual_seed(1)
        for _ in range(STEPS):
            quiet = outer.no_sync() if silent and model is stored else nullcontext()
            accumulate(model, but_last=quiet, set_to_none=set_to_none)
            optimizer.step()
    assert_same_bits(plain, stored)


def test_with_no_sync_each_gradient_is_sent_once_and_while_backward_runs(store: psstore.Store) -> None:
    model = deep()
    optimizer = distributed(model, store, MOMENTUM)
    for _ in range(STEPS):
        before = store.bytes_pushed
        accumulate(model, but_last=optimizer.no_sync())
        store.settle()
        assert store.bytes_pushed - before == num_bytes(model)
        optimizer.step()
        assert store.bytes_pushed - before == num_bytes(model)


def test_without_no_sync_the_hooks_give_up_after_one_step(store: psstore.Store) -> None:
    model = deep()
    optimizer = distributed(model, store, MOMENTUM)
    sent = []
    for _ in range(STEPS):
        before = store.bytes_pushed
        accumulate(model, but_last=nullcontext())
        optimizer.step()
        sent.append((store.bytes_pushed - before) // num_bytes(model))
    assert sent == [2, 1, 1, 1]


def test_gradients_left_in_no_sync_alone_are_sent_by_step(store: psstore.Store) -> None:
    plain, stored = Odd(), Odd()
    inner, outer = MOMENTUM(plain.parameters()), distributed(stored, store, MOMENTUM)
    inputs = next(batches(1))
    backward(plain, inputs)
    with outer.no_sync():
        backward(stored, inputs)
    inner.step()
    outer.step()
    assert_same_bits(plain, stored)


@pytest.mark.parametrize("shards", [1, 3])
def test_workers_that_accumulate_equal_one_process(shards: int) -> None:
    """Each worker sums its micro-batches; the sums are added in rank order and halved. A parameter has a gradient in
    some micro-batches only, of some workers only."""
    models = [Odd(seed=rank) for rank in range(2)]

    def micro_batches(rank: int) -> Iterator[list[tuple[torch.Tensor, bool]]]:
        stream = batches(STEPS * MICRO_BATCHES, seed=rank)
        for number in range(STEPS):
            yield [(next(stream), (number + rank + i) % 5 == 0) for i in range(MICRO_BATCHES)]

    def work(store: psstore.Store, rank: int) -> None:
        optimizer = distributed(models[rank], store, MOMENTUM)
        for step in micro_batches(rank):
            optimizer.zero_grad()
            for i, (inputs, use_all) in enumerate(step):
                with optimizer.no_sync() if i < MICRO_BATCHES - 1 else nullcontext():
                    backward(models[rank], inputs, use_all=use_all)
            optimizer.step()

    def together() -> Odd:
        model = Odd(seed=0)
        optimizer = MOMENTUM(model.parameters())
        for steps in zip(*[micro_batches(rank) for rank in range(2)], strict=True):
            sums: list[list[torch.Tensor | None]] = []
            for step in steps:
                optimizer.zero_grad()
                for inputs, use_all in step:
                    backward(model, inputs, use_all=use_all)
                sums.append([parameter.grad for parameter in model.parameters()])
            for parameter, *parts in zip(model.parameters(), *sums, strict=True):
                present = [part for part in parts if part is not None]
                parameter.grad = torch.stack(present).sum(0) / 2 if present else None
            optimizer.step()
        return model

    on_each_worker(2, work, shards=shards)
    expected = together()
    for model in models:
        assert_same_bits(model, expected)


# ---- steps taken again ----


def test_a_step_that_waited_in_vain_can_be_taken_again() -> None:
    """The other worker was late: nothing changed, the commit stands, and no gradient counts twice."""
    models = [Odd(seed=0) for _ in range(2)]
    plain = Odd(seed=0)
    inner = MOMENTUM(plain.parameters())
    with psstore.LocalStore(workers=2) as local:
        first, second = local.connect(rank=0, wait_s=0.01), local.connect(rank=1)
        optimizers = [distributed(model, one, MOMENTUM) for model, one in zip(models, (first, second), strict=True)]
        inputs = next(batches(1))
        for model in (*models, plain):
            backward(model, inputs)
        for _ in range(2):
            with pytest.raises(DeadlineExceeded):
                optimizers[0].step()
            assert_same_bits(models[0], plain)
        optimizers[1].step()
        optimizers[0].step()
        assert first.round == second.round == 2
        inner.step()
        assert_same_bits(models[0], plain)
        assert_same_bits(models[1], plain)
        for one in (first, second):
            one.close()


@pytest.mark.parametrize("overlap", ["none", "backward"])
def test_gradients_after_a_step_that_waited_in_vain_are_the_next_rounds(overlap: Overlap) -> None:
    """A loop that goes on with its next batch loses neither."""
    plain = nn.Linear(5, 3)
    inner = MOMENTUM(plain.parameters())
    models = [deepcopy(plain) for _ in range(2)]
    with psstore.LocalStore(workers=2) as local:
        first, second = local.connect(rank=0, wait_s=0.05), local.connect(rank=1)
        optimizers = [
            DistributedOptimizer(MOMENTUM(model.parameters()), store, model.named_parameters(), overlap=overlap)
            for model, store in zip(models, (first, second), strict=True)
        ]
        one, two = batches(2)

        def pass_back(optimizer: torch.optim.Optimizer, model: nn.Module, inputs: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(inputs).sum().backward()  # whose gradients are those of any weights

        def insist() -> None:
            while first.round < 3:
                with suppress(DeadlineExceeded):
                    optimizers[0].step()

        pass_back(optimizers[0], models[0], one)
        with pytest.raises(DeadlineExceeded):
            optimizers[0].step()
        assert first.is_sealed
        pass_back(optimizers[1], models[1], one)
        optimizers[1].step()
        for optimizer, model in zip(optimizers, models, strict=True):
            pass_back(optimizer, model, two)
        in_threads([insist, optimizers[1].step])
        for inputs in (one, two):
            pass_back(inner, plain, inputs)
            inner.step()
        for model in models:
            assert_same_bits(model, plain)
        for store in (first, second):
            store.close()


def test_a_step_that_committed_only_fetches_when_it_is_taken_again(
    store: psstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, stored = Odd(), Odd()
    inner, outer = MOMENTUM(plain.parameters()), distributed(stored, store, MOMENTUM)
    inputs = next(batches(1))
    for model in (plain, stored):
        backward(model, inputs)
    with monkeypatch.context() as patched:
        patched.setattr(store, "pull_many", too_slow)
        with pytest.raises(DeadlineExceeded):
            outer.step()
    outer.step()
    inner.step()
    assert store.round == 2
    assert_same_bits(plain, stored)


def test_gradients_after_a_step_that_did_not_fetch_are_the_next_rounds(
    store: psstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = Odd()
    outer = distributed(stored, store, MOMENTUM)
    backward(stored, next(batches(1)))
    with monkeypatch.context() as patched:
        patched.setattr(store, "pull_many", too_slow)
        with pytest.raises(DeadlineExceeded):
            outer.step()
    outer.zero_grad()
    backward(stored, next(batches(1)))
    outer.step()
    assert store.round == 3


def too_slow(*_: object, **__: object) -> None:
    raise DeadlineExceeded("the store did not answer within 0 s")
