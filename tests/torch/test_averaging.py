"""Model averaging: workers train alone, and every few steps everybody has the average of their parameters."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch.optim import SGD, AdamW, NAdam, Optimizer

import psstore
from psstore.errors import UsageError
from psstore.torch import DistributedOptimizer
from tests.torch.support import Odd, OptimizerFactory, assert_same_bits, backward, batches, on_each_worker

STEPS = 7
EVERY = 3

FACTORIES: dict[str, OptimizerFactory] = {
    "sgd": partial(SGD, lr=0.1, momentum=0.9),
    "adamw": partial(AdamW, lr=0.01),
    "nadam": partial(NAdam, lr=0.01),
}


def averaging(
    model: Odd, store: psstore.Store, factory: OptimizerFactory, *, every: int = EVERY
) -> DistributedOptimizer:
    return DistributedOptimizer(
        factory(model.parameters()), store, model.named_parameters(), mode="average", every=every
    )


def train(model: Odd, optimizer: Optimizer, steps: int, *, seed: int) -> None:
    for inputs in batches(steps, seed=seed):
        optimizer.zero_grad()
        backward(model, inputs)
        optimizer.step()


@torch.no_grad()
def average(models: list[Odd]) -> None:
    """In rank order, as the store sums."""
    for parameters in zip(*(model.parameters() for model in models), strict=True):
        mean = sum(parameters[1:], parameters[0].clone()) / len(parameters)
        for parameter in parameters:
            parameter.copy_(mean)


@pytest.mark.parametrize("name", FACTORIES)
def test_workers_equal_processes_that_average_now_and_then(name: str) -> None:
    models = [Odd(seed=rank) for rank in range(3)]

    def work(store: psstore.Store, rank: int) -> None:
        optimizer = averaging(models[rank], store, FACTORIES[name])
        train(models[rank], optimizer, STEPS, seed=100 + rank)
        assert store.version == STEPS // EVERY
        optimizer.synchronize()

    on_each_worker(3, work, shards=2)
    plain = [Odd(seed=0) for _ in range(3)]
    optimizers = [FACTORIES[name](model.parameters()) for model in plain]
    streams = [list(batches(STEPS, seed=100 + rank)) for rank in range(3)]
    for number in range(STEPS):
        for model, optimizer, stream in zip(plain, optimizers, streams, strict=True):
            optimizer.zero_grad()
            backward(model, stream[number])
            optimizer.step()
        if (number + 1) % EVERY == 0:
            average(plain)
    average(plain)
    for model, expected in zip(models, plain, strict=True):
        assert_same_bits(model, expected)


def test_a_weight_is_a_share_in_the_average() -> None:
    models = [Odd(seed=0) for _ in range(2)]
    begun = models[0].bias.detach().clone()

    def work(store: psstore.Store, rank: int) -> None:
        optimizer = averaging(models[rank], store, partial(SGD, lr=0.0))
        optimizer.weight = 3.0 if rank else 1.0
        with torch.no_grad():
            models[rank].bias.add_(float(rank))
        optimizer.synchronize()

    on_each_worker(2, work)
    for model in models:
        torch.testing.assert_close(model.bias, begun + 0.75)


def test_one_worker_trains_as_plain_torch() -> None:
    plain, stored = Odd(), Odd()
    train(plain, FACTORIES["adamw"](plain.parameters()), STEPS, seed=1)
    with psstore.connect("local://") as store:
        train(stored, averaging(stored, store, FACTORIES["adamw"]), STEPS, seed=1)
    assert_same_bits(plain, stored)


def test_only_averages_travel() -> None:
    stored = Odd()
    with psstore.connect("local://") as store:
        optimizer = averaging(stored, store, FACTORIES["adamw"])
        created = store.bytes_pushed
        train(stored, optimizer, EVERY - 1, seed=1)
        assert store.bytes_pushed == created
        train(stored, optimizer, 1, seed=1)
        assert store.bytes_pushed == created + sum(parameter.nbytes for parameter in stored.parameters())


def test_state_is_the_wrapped_optimizers() -> None:
    plain, stored = Odd(), Odd()
    local = FACTORIES["adamw"](plain.parameters())
    with psstore.connect("local://") as store:
        optimizer = averaging(stored, store, FACTORIES["adamw"])
        for model, one in ((plain, local), (stored, optimizer)):
            train(model, one, STEPS, seed=1)
        assert optimizer.state is optimizer.optimizer.state
        optimizer.load_state_dict(deepcopy(local.state_dict()))
        for model, one in ((plain, local), (stored, optimizer)):
            train(model, one, STEPS, seed=2)
    assert_same_bits(plain, stored)


def test_clipping_is_each_workers_own() -> None:
    plain, stored = Odd(), Odd()
    local = FACTORIES["sgd"](plain.parameters())
    with psstore.connect("local://") as store:
        optimizer = averaging(stored, store, FACTORIES["sgd"])
        for inputs in batches(STEPS):
            for model, one in ((plain, local), (stored, optimizer)):
                one.zero_grad()
                backward(model, inputs)
            expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            assert torch.equal(optimizer.clip_grad_norm_(0.1), expected)
            local.step()
            optimizer.step()
    assert_same_bits(plain, stored)


def test_synchronize_has_nothing_to_do_where_gradients_are_exchanged() -> None:
    model = Odd()
    with psstore.connect("local://") as store:
        DistributedOptimizer(FACTORIES["sgd"](model.parameters()), store, model.named_parameters()).synchronize()
        assert store.version == 0
    assert_same_bits(model, Odd())


# ---- what is refused ----


def test_options_that_mean_nothing_are_refused() -> None:
    model = Odd()
    with psstore.connect("local://") as store:
        inner = SGD(model.parameters(), lr=0.1)
        make = partial(DistributedOptimizer, inner, store, list(model.named_parameters()))
        with pytest.raises(UsageError, match="every is 0"):
            make(mode="average", every=0)
        with pytest.raises(UsageError, match=r"every=4 is for mode='average'"):
            make(every=4)
        with pytest.raises(UsageError, match="average=False"):
            make(mode="average", average=False)
        with pytest.raises(UsageError, match="mode is 'mean'; it must be one of 'gradients', 'average'"):
            make(mode="mean")  # type: ignore[arg-type]
        assert store.keys() == []


def test_compression_that_comes_with_a_later_group_is_refused() -> None:
    model, head = Odd(), torch.nn.Linear(2, 2)
    with psstore.connect("local://") as store:
        optimizer = averaging(model, store, FACTORIES["sgd"], every=1)
        optimizer.add_param_group({"params": list(head.named_parameters("head")), "compression": "int8"})
        with pytest.raises(UsageError, match=r"has come with compression.* make it anew"):
            train(model, optimizer, 1, seed=1)


def test_a_scaled_loss_trains_as_an_unscaled_one_and_an_overflow_skips_that_step_here() -> None:
    plain, stored = Odd(), Odd()
    local = FACTORIES["sgd"](plain.parameters())
    scaler = psstore.torch.GradScaler("cpu", init_scale=4.0)
    with psstore.connect("local://") as store:
        optimizer = averaging(stored, store, FACTORIES["sgd"])
        for number, inputs in enumerate(batches(STEPS)):
            local.zero_grad()
            backward(plain, inputs)
            if number != 2:
                local.step()
            optimizer.zero_grad()
            scaler.scale(stored(inputs).square().mean() * (torch.inf if number == 2 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            assert optimizer.skipped == (number == 2)
    assert_same_bits(plain, stored)
