"""Optimizers that are more than a step: schedule-free ones, whose weights depend on what they are for, Lookahead, which
wraps another, and SAM, which takes two gradients."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, NAdam, Optimizer

import psstore
from psstore.errors import UsageError
from tests.torch.support import (
    Odd,
    OptimizerFactory,
    assert_same_bits,
    backward,
    batches,
    distributed,
    on_each_worker,
)

STEPS = 7


class ScheduleFree(Optimizer):
    """Schedule-free SGD (Defazio et al., "The Road Less Scheduled", equations 5 to 7): gradients are taken at y, and
    `eval` makes the parameters the average x."""

    def __init__(self, params: Any, lr: float, beta: float = 0.9) -> None:
        self.trains = True
        self.num_steps = 0
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.trains
        self.num_steps += 1
        for parameter, state, beta, lr in self._each():
            if parameter.grad is not None:
                z = state.setdefault("z", parameter.clone())
                x = state.setdefault("x", parameter.clone())
                z -= lr * parameter.grad
                x.lerp_(z, 1 / self.num_steps)
                parameter.copy_(z.lerp(x, beta))

    @torch.no_grad()
    def eval(self) -> None:
        self.trains = False
        for parameter, state, _, _ in self._each():
            if "x" in state:
                parameter.copy_(state["x"])

    @torch.no_grad()
    def train(self) -> None:
        self.trains = True
        for parameter, state, beta, _ in self._each():
            if "x" in state:
                parameter.copy_(state["z"].lerp(state["x"], beta))

    def _each(self) -> Iterator[tuple[torch.Tensor, dict[str, Any], float, float]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                yield parameter, self.state[parameter], group["beta"], group["lr"]


class Lookahead(Optimizer):
    """Lookahead (Zhang et al., algorithm 1), built as its implementations are: over an optimizer, whose groups it has
    and does not let go of, without torch's constructor, and with a state dict of both."""

    def __init__(self, inner: Optimizer, *, every: int = 3, alpha: float = 0.5) -> None:
        self.inner, self.every, self.alpha, self.num_steps = inner, every, alpha, 0
        self.defaults = inner.defaults
        self.state = defaultdict(dict)
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = self._parameters()
        for parameter in parameters:
            self.state[parameter].setdefault("slow", parameter.clone())
        self.inner.step()
        self.num_steps += 1
        if self.num_steps % self.every == 0:
            for parameter in parameters:
                parameter.copy_(self.state[parameter]["slow"].lerp_(parameter, self.alpha))

    def state_dict(self) -> dict[str, Any]:
        slow = [self.state[parameter]["slow"] for parameter in self._parameters()]
        return {"slow": slow, "inner": self.inner.state_dict(), "num_steps": self.num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict["inner"])
        self.num_steps = state_dict["num_steps"]
        for parameter, slow in zip(self._parameters(), state_dict["slow"], strict=True):
            self.state[parameter]["slow"] = slow

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]


class Sharpness(SGD):
    """As SAM's implementations are."""

    def first_step(self) -> None:
        raise AssertionError("it moves the weights")

    def second_step(self) -> None:
        raise AssertionError("it moves them back")


class Sharp(SGD):
    """A subclass, which may step otherwise."""


class OnlyByClosure(SGD):
    def step(self, closure: Callable[[], float]) -> float:  # type: ignore[override]
        return closure()


def lookahead(params: Any) -> Lookahead:
    return Lookahead(NAdam(params, lr=0.01))


def train(model: Odd, optimizer: Any, *, seed: int) -> None:
    for inputs in batches(STEPS, seed=seed):
        optimizer.zero_grad()
        backward(model, inputs)
        optimizer.step()


def averaged(model: Odd, optimizer: Optimizer, gradients: Callable[[torch.Tensor], object] | None = None) -> None:
    """Trains in one process as two workers do, of seeds 100 and 101. `gradients`: in place of a backward pass."""
    for pair in zip(*(batches(STEPS, seed=100 + rank) for rank in range(2)), strict=True):
        found: list[torch.Tensor | None] = [None for _ in model.parameters()]
        for inputs in pair:
            optimizer.zero_grad()
            (gradients or partial(backward, model))(inputs)
            for i, parameter in enumerate(model.parameters()):
                if parameter.grad is not None:
                    before = found[i]
                    found[i] = parameter.grad.clone() if before is None else before + parameter.grad
        for total, parameter in zip(found, model.parameters(), strict=True):
            parameter.grad = None if total is None else total / 2
        optimizer.step()


@pytest.mark.parametrize("factory", [partial(ScheduleFree, lr=0.1), lookahead], ids=["schedule-free", "lookahead"])
def test_workers_equal_one_process(factory: OptimizerFactory) -> None:
    models = [Odd(seed=rank) for rank in range(2)]

    def work(store: psstore.Store, rank: int) -> None:
        train(models[rank], distributed(models[rank], store, factory), seed=100 + rank)

    on_each_worker(2, work, shards=2)
    plain = Odd(seed=0)
    averaged(plain, factory(plain.parameters()))
    for model in models:
        assert_same_bits(model, plain)


def test_what_the_wrapped_optimizer_can_do_is_done_through_the_other(store: psstore.Store) -> None:
    plain, stored = Odd(), Odd()
    inner = ScheduleFree(plain.parameters(), lr=0.1)
    outer = distributed(stored, store, partial(ScheduleFree, lr=0.1))
    for model, optimizer in ((plain, inner), (stored, outer)):
        train(model, optimizer, seed=1)
        optimizer.eval()
    assert_same_bits(plain, stored)
    assert not outer.trains
    for model, optimizer in ((plain, inner), (stored, outer)):
        optimizer.train()
        train(model, optimizer, seed=2)
    assert_same_bits(plain, stored)


def test_what_neither_has_is_missed_by_name(store: psstore.Store) -> None:
    outer = distributed(Odd(), store, partial(SGD, lr=0.1))
    assert not hasattr(outer, "eval")
    with pytest.raises(AttributeError, match=r"SGD.*'eval'"):
        outer.eval()
    with pytest.raises(AttributeError, match=r"DistributedOptimizer.*'_cache'"):
        outer._cache  # noqa: B018


def test_the_state_of_an_optimizer_in_an_optimizer_is_saved_and_loaded() -> None:
    plain, stored, resumed = Odd(), Odd(), Odd(seed=4)
    local = lookahead(plain.parameters())
    with psstore.connect("local://") as first, psstore.connect("local://") as second:
        outer = distributed(stored, first, lookahead)
        for model, optimizer in ((plain, local), (stored, outer)):
            train(model, optimizer, seed=1)
        resumed.load_state_dict(stored.state_dict())
        again = distributed(resumed, second, lookahead)
        again.load_state_dict(deepcopy(outer.state_dict()))
        for model, optimizer in ((plain, local), (resumed, again)):
            train(model, optimizer, seed=2)
    assert_same_bits(plain, resumed)


def test_whose_state_it_is_is_said_once_by_rank_0(recwarn: pytest.WarningsRecorder) -> None:
    def work(store: psstore.Store, rank: int) -> None:
        model = Odd()
        train(model, distributed(model, store, partial(Sharp, lr=0.1)), seed=rank)

    on_each_worker(2, work)
    said = [str(one.message) for one in recwarn if "no rule for" in str(one.message)]
    assert len(said) == 1
    assert "no rule for Sharp: it reduces" in said[0]
    assert "SGD, Adam, AdamW, Adagrad, RMSprop, DelayedNesterov, and for no subclass" in said[0]


# ---- more gradients than one ----


@pytest.mark.parametrize(
    ("factory", "reason"),
    [(Sharpness, r"those of SAM.*no_sync\(\)"), (OnlyByClosure, "can't do without a closure")],
)
def test_an_optimizer_of_several_gradients_is_refused_by_name(
    store: psstore.Store, factory: OptimizerFactory, reason: str
) -> None:
    with pytest.raises(UsageError, match=rf"{factory.__name__} can't be distributed: .*{reason}"):
        distributed(Odd(), store, partial(factory, lr=0.1))
    assert store.keys() == []


def sharpest(
    model: Odd,
    inputs: torch.Tensor,
    *,
    rho: float = 0.05,
    no_sync: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """The gradient where a step of length `rho` along the gradient leads to; the weights stay as they are."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with no_sync():
        backward(model, inputs)
    gradients = [parameter.grad for parameter in model.parameters()]
    norm = torch.stack([one.norm() for one in gradients if one is not None]).norm()
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            if gradient is not None:
                parameter.add_(rho / norm * gradient)
    model.zero_grad()
    backward(model, inputs)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), before, strict=True):
            parameter.copy_(value)


@pytest.mark.filterwarnings("error")
def test_sharpness_aware_steps_are_taken_by_hand() -> None:
    """Each worker moves along its own gradient, as in the paper (Foret et al., section 4.1), and the store
    averages the gradients there."""
    models = [Odd(seed=rank) for rank in range(2)]

    def work(store: psstore.Store, rank: int) -> None:
        model = models[rank]
        optimizer = distributed(model, store, partial(AdamW, lr=0.01))
        for inputs in batches(STEPS, seed=100 + rank):
            optimizer.zero_grad()
            sharpest(model, inputs, no_sync=optimizer.no_sync)
            optimizer.step()

    on_each_worker(2, work, shards=2)
    plain = Odd(seed=0)
    averaged(plain, AdamW(plain.parameters(), lr=0.01), partial(sharpest, plain))
    for model in models:
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other)
