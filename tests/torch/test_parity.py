"""A worker alone trains as plain torch does, bit for bit.

torch's Adam family takes its square root from a math library that is off by one ulp now and then, so it is given
the exact one (tests/kernels/parity.py); docs/update_rules.md has the figures of both.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

import psstore
from tests.kernels.parity import exact_square_root
from tests.torch.support import DECOUPLED_ADAM, Odd, OptimizerFactory, assert_same_bits, backward, batches, distributed

STEPS = 50

CASES: dict[str, OptimizerFactory] = {
    "sgd": partial(SGD, lr=0.1),
    "sgd momentum": partial(SGD, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "sgd nesterov": partial(SGD, lr=0.05, momentum=0.9, nesterov=True),
    "sgd maximize": partial(SGD, lr=1e-3, maximize=True),
    "adam": partial(Adam, lr=0.01),
    "adam betas": partial(Adam, lr=0.01, betas=(0.4, 0.95), eps=1e-6, weight_decay=0.01),
    "adam amsgrad": partial(Adam, lr=0.01, amsgrad=True, maximize=True),
    **DECOUPLED_ADAM,
    "adamw": partial(AdamW, lr=0.01),
    "adamw amsgrad": partial(AdamW, lr=0.01, weight_decay=0.1, amsgrad=True),
    "adagrad": partial(Adagrad, lr=0.05),
    "adagrad options": partial(Adagrad, lr=0.05, lr_decay=0.01, weight_decay=0.01, initial_accumulator_value=0.1),
    "rmsprop": partial(RMSprop, lr=0.01),
    "rmsprop centered": partial(RMSprop, lr=0.01, momentum=0.9, centered=True, weight_decay=0.01),
}


def train_both(factory: OptimizerFactory, *, dtype: torch.dtype = torch.float32, steps: int = STEPS) -> tuple[Odd, Odd]:
    plain, stored = Odd(dtype=dtype), Odd(dtype=dtype)
    optimizer = factory(plain.parameters(), foreach=False)
    with psstore.connect("local://?shards=2") as store, exact_square_root():
        through_store = distributed(stored, store, partial(factory, foreach=False))
        for number, inputs in enumerate(batches(steps, dtype=dtype)):
            for model, one in ((plain, optimizer), (stored, through_store)):
                one.zero_grad()
                backward(model, inputs, use_all=number % 3 != 1)
                one.step()
    return plain, stored


@pytest.mark.parametrize("case", CASES)
def test_training_equals_plain_torch_bit_for_bit(case: str) -> None:
    assert_same_bits(*train_both(CASES[case]))


@pytest.mark.parametrize("case", ["sgd nesterov", "adamw"])
def test_training_in_double_precision_equals_plain_torch(case: str) -> None:
    assert_same_bits(*train_both(CASES[case], dtype=torch.float64))


def test_each_parameter_group_has_its_own_rule_options() -> None:
    def grouped(parameters: object, **options: bool) -> torch.optim.Optimizer:
        first, *rest = list(parameters)  # type: ignore[call-overload]
        groups = [{"params": [first], "lr": 0.3}, {"params": rest, "weight_decay": 0.1, "momentum": 0.5}]
        return SGD(groups, lr=0.01, **options)

    assert_same_bits(*train_both(grouped))


def test_sums_of_adagrad_begin_as_its_constructor_was_told_whatever_a_group_says() -> None:
    """torch makes them with the optimizer, and does not look at groups for it."""

    def grouped(parameters: object, **options: bool) -> torch.optim.Optimizer:
        first, *rest = list(parameters)  # type: ignore[call-overload]
        groups = [{"params": [first]}, {"params": rest, "initial_accumulator_value": 0.5}]
        return Adagrad(groups, lr=0.05, initial_accumulator_value=0.1, **options)

    assert_same_bits(*train_both(grouped))


@pytest.mark.skipif(not DECOUPLED_ADAM, reason="torch has no such flag")
def test_a_group_of_adamw_may_have_a_decay_that_is_not_decoupled() -> None:
    """As torch has it, whose AdamW is an Adam with another flag."""

    def coupled(parameters: object, **options: bool) -> torch.optim.Optimizer:
        optimizer = AdamW(parameters, lr=0.01, weight_decay=0.1, **options)  # type: ignore[arg-type]
        optimizer.param_groups[0]["decoupled_weight_decay"] = False
        return optimizer

    assert_same_bits(*train_both(coupled))


@pytest.mark.parametrize("wrapped", [False, True], ids=["of the distributed", "of the plain"])
def test_schedules_reach_the_store_from_either_optimizer(wrapped: bool) -> None:
    plain, stored = Odd(), Odd()
    optimizer = SGD(plain.parameters(), lr=0.1, momentum=0.9, foreach=False)
    inner = SGD(stored.parameters(), lr=0.1, momentum=0.9, foreach=False)
    with psstore.connect("local://") as store:
        outer = psstore.torch.DistributedOptimizer(inner, store, named_parameters=stored.named_parameters())
        schedules = [
            torch.optim.lr_scheduler.OneCycleLR(one, max_lr=0.2, total_steps=20)
            for one in (optimizer, inner if wrapped else outer)
        ]
        for inputs in batches(20):
            for model, one, schedule in zip((plain, stored), (optimizer, outer), schedules, strict=True):
                one.zero_grad()
                backward(model, inputs)
                one.step()
                schedule.step()
    assert_same_bits(plain, stored)


def test_tensor_learning_rates_are_read_at_each_step() -> None:
    plain, stored = Odd(), Odd()
    rate = torch.tensor(0.1)
    with psstore.connect("local://") as store:
        optimizers = (SGD(plain.parameters(), lr=0.1, foreach=False), distributed(stored, store, partial(SGD, lr=rate)))
        for number, inputs in enumerate(batches(5)):
            optimizers[0].param_groups[0]["lr"] = float(rate.fill_(0.1 / (1 + number)))
            for model, one in zip((plain, stored), optimizers, strict=True):
                one.zero_grad()
                backward(model, inputs)
                one.step()
    assert_same_bits(plain, stored)


def test_two_optimizers_of_one_class_share_a_store() -> None:
    """As a generator's and a discriminator's do: each step is a round of its own."""
    factories = (partial(SGD, lr=0.1, momentum=0.9, foreach=False), partial(SGD, lr=0.01, foreach=False))
    plain, stored = (Odd(0), Odd(1)), (Odd(0), Odd(1))
    with psstore.connect("local://?shards=2") as store:
        inner = [factory(model.parameters()) for factory, model in zip(factories, plain, strict=True)]
        outer = [
            psstore.torch.DistributedOptimizer(
                factory(model.parameters()), store, named_parameters=model.named_parameters(prefix=prefix)
            )
            for prefix, factory, model in zip("ab", factories, stored, strict=True)
        ]
        for number, inputs in enumerate(batches(10)):
            for models, optimizers in ((plain, inner), (stored, outer)):
                optimizers[number % 2].zero_grad()
                backward(models[number % 2], inputs)
                optimizers[number % 2].step()
    for one, other in zip(plain, stored, strict=True):
        assert_same_bits(one, other)
