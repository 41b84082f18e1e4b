"""Learners whose contributions are each an outer step of its own, held against one process that does the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch.optim import SGD, AdamW

import psstore
from psstore.errors import UsageError
from psstore.torch import DelayedNesterov, DiLoCo
from psstore.torch.fragments import cut
from psstore.torch.learner_processes import LearnerProcesses
from psstore.torch.parameters import Trained
from psstore.torch.turns import fragment_of
from tests.torch.support import Odd, OptimizerFactory, assert_same_bits, backward, batches

ADAMW: OptimizerFactory = partial(AdamW, lr=0.01)
DELAYED: OptimizerFactory = partial(DelayedNesterov, lr=0.5, every=3, activation=0.2)

TURNS = (0, 1, 0, 2, 0, 0, 1, 2, 0, 1, 0, 2, 0, 0, 1, 0, 2, 1, 0, 0)
"""Whose contribution is next: learner 0 is quicker than the others."""

FRAGMENTS = 2
STEPS = 2
"""Between two contributions of a learner."""


def steps_of(model: Odd, optimizer: torch.optim.Optimizer, inputs: Iterator[torch.Tensor]) -> None:
    for _ in range(STEPS):
        optimizer.zero_grad()
        backward(model, next(inputs))
        optimizer.step()


def parts_of(model: Odd) -> list[list[str]]:
    trained = [Trained(name, one, 0) for name, one in model.named_parameters()]
    return [fragment.names for fragment in cut(trained, LearnerProcesses().wholes(trained), FRAGMENTS)]


class Alone:
    """One of the learners of `in_one_process`."""

    def __init__(self, values: dict[str, torch.Tensor], rank: int) -> None:
        self.model = Odd()
        self.inner = ADAMW(self.model.parameters())
        self.inputs = batches(1000, seed=100 + rank)
        self.base = {name: value.detach().clone() for name, value in values.items()}
        self.rounds = 0

    @torch.no_grad()
    def contribution(self, name: str) -> torch.Tensor:
        return self.base[name] - self.model.get_parameter(name)

    @torch.no_grad()
    def take(self, name: str, value: torch.Tensor) -> None:
        self.base[name] = value.detach().clone()
        self.model.get_parameter(name).copy_(value)


def in_one_process(
    turns: Sequence[int], outer: OptimizerFactory, compensate: Callable[..., torch.Tensor] | None = None
) -> list[Odd]:
    """Liu et al., arXiv:2401.09135, algorithm 2, with fragments: the models of three learners, of which one after the
    other takes its steps, has the outer optimizer step by what it has done to a fragment, and takes the new values."""
    values = {name: one.detach().clone().requires_grad_() for name, one in Odd().named_parameters()}
    parts = parts_of(Odd())
    outers = [outer([values[name] for name in names]) for names in parts]
    learners = [Alone(values, rank) for rank in range(3)]
    for rank in turns:
        one = learners[rank]
        steps_of(one.model, one.inner, one.inputs)
        one.rounds += 1
        number = fragment_of(one.rounds, FRAGMENTS)
        for name in parts[number]:
            gradient = one.contribution(name)
            if compensate is not None:
                gradient = compensate(gradient, values[name].detach(), one.base[name])
            values[name].grad = gradient
        outers[number].step()
        for name in parts[number]:
            one.take(name, values[name])
    return [one.model for one in learners]


def on_a_store(turns: Sequence[int], outer: OptimizerFactory, mode: str) -> list[Odd]:
    models = [Odd(seed=rank) for rank in range(3)]
    inputs = [batches(1000, seed=100 + rank) for rank in range(3)]
    staleness = {"staleness": len(turns)} if mode == "ssp" else {}
    with psstore.LocalStore(2, workers=3, mode=mode, **staleness) as local, ExitStack() as ends:  # type: ignore[arg-type]
        learners = []
        for rank, model in enumerate(models):
            store = ends.enter_context(local.connect(rank=rank))
            options = {"every": STEPS * FRAGMENTS, "fragments": FRAGMENTS, "outer": outer(model.parameters())}
            learners.append(DiLoCo(model, ADAMW(model.parameters()), store, **options))  # type: ignore[arg-type]
        for rank in turns:
            steps_of(models[rank], learners[rank], inputs[rank])
    return models


@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_each_contribution_is_a_step_of_delayed_nesterov(mode: str) -> None:
    for model, expected in zip(on_a_store(TURNS, DELAYED, mode), in_one_process(TURNS, DELAYED), strict=True):
        assert_same_bits(model, expected)


def test_a_stale_contribution_can_be_compensated() -> None:
    """By the values that its learner had, to first order, as docs/update_rules.md has it."""

    def compensated(gradient: torch.Tensor, value: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        return gradient.addcmul(gradient * 2.0 * gradient, value - base)

    def outer(parameters: Iterator[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return SGD([{"params": list(parameters), "compensation": 2.0}], lr=0.5)

    plain = in_one_process(TURNS, partial(SGD, lr=0.5))
    expected = in_one_process(TURNS, partial(SGD, lr=0.5), compensated)
    for model, held_against, other in zip(on_a_store(TURNS, outer, "async"), expected, plain, strict=True):
        torch.testing.assert_close(model.state_dict(), held_against.state_dict(), rtol=1e-5, atol=1e-6)
        assert not torch.allclose(model.first, other.first, rtol=1e-5, atol=1e-6)


def test_a_learner_that_comes_begins_with_the_newest_values_and_takes_its_turns() -> None:
    first, second = Odd(), Odd(seed=1)
    options = {"every": STEPS * FRAGMENTS, "fragments": FRAGMENTS}
    with psstore.LocalStore(workers=2, mode="async") as local, local.connect(rank=0) as one:
        early = DiLoCo(first, ADAMW(first.parameters()), one, outer=DELAYED(first.parameters()), **options)  # type: ignore[arg-type]
        for _ in range(3):
            steps_of(first, early, batches(STEPS))
        early.synchronize()
        with local.connect(rank=1) as other:
            late = DiLoCo(second, ADAMW(second.parameters()), other, outer=DELAYED(second.parameters()), **options)  # type: ignore[arg-type]
            assert_same_bits(first, second)
            before = deepcopy(second)
            steps_of(second, late, batches(STEPS))
            assert other.version == 4
            early.synchronize()
        moved = {name for name, value in first.named_parameters() if not torch.equal(value, before.get_parameter(name))}
        assert moved - {"empty"} == set(parts_of(second)[fragment_of(other.round - 1, FRAGMENTS)]) - {"empty"}


@pytest.mark.parametrize("weight", ["tokens", 2.0])
def test_a_weight_is_refused_where_there_is_no_mean(weight: str | float) -> None:
    model = Odd()
    with psstore.LocalStore(workers=2, mode="async") as local, local.connect(rank=0) as store:
        with pytest.raises(
            UsageError, match=f"weight is {weight!r}, .* in mode 'async' each one's contribution is a step"
        ):
            DiLoCo(model, ADAMW(model.parameters()), store, weight=weight)  # type: ignore[arg-type]
        assert store.keys() == []
