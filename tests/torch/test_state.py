"""Optimizer state is torch's, both ways: a checkpoint of either goes on in the other as if nothing had happened."""

from __future__ import annotations

import io
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop, lr_scheduler

import psstore
from psstore.errors import BadArgument
from psstore.torch import DelayedNesterov
from tests.torch.support import (
    DECOUPLED_ADAM,
    Odd,
    OptimizerFactory,
    assert_same_bits,
    backward,
    batches,
    distributed,
    on_each_worker,
)

pytestmark = pytest.mark.usefixtures("exact")

STEPS = 4


def delayed_nesterov(parameters: Iterable[torch.Tensor], **options: object) -> Optimizer:
    """Keeps what chooses an implementation, of which there is one, as torch's do."""
    return DelayedNesterov([{"params": list(parameters), **options}], lr=0.1, every=3)


CASES: dict[str, OptimizerFactory] = {
    "sgd": partial(SGD, lr=0.1),
    "sgd momentum": partial(SGD, lr=0.05, momentum=0.9, dampening=0.1),
    "sgd nesterov": partial(SGD, lr=0.05, momentum=0.9, nesterov=True, maximize=True),
    "adam": partial(Adam, lr=0.01),
    "adam amsgrad": partial(Adam, lr=0.01, amsgrad=True, weight_decay=0.1),
    **DECOUPLED_ADAM,
    "adamw": partial(AdamW, lr=0.01),
    "adamw amsgrad": partial(AdamW, lr=0.01, amsgrad=True),
    "adagrad": partial(Adagrad, lr=0.05, lr_decay=0.01, initial_accumulator_value=0.1),
    "rmsprop": partial(RMSprop, lr=0.01),
    "rmsprop momentum": partial(RMSprop, lr=0.01, momentum=0.9),
    "rmsprop centered": partial(RMSprop, lr=0.01, momentum=0.9, centered=True),
    "delayed nesterov": delayed_nesterov,
}


def train(model: Odd, optimizer: Optimizer, steps: int = STEPS, *, seed: int = 1) -> None:
    """`sometimes` has no gradient in the first step, so that it is a step behind."""
    for number, inputs in enumerate(batches(steps, seed=seed)):
        optimizer.zero_grad()
        backward(model, inputs, use_all=number > 0)
        optimizer.step()


def saved(state_dict: dict[str, Any]) -> dict[str, Any]:
    """As it comes out of a file."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def assert_same_state(left: dict[str, Any], right: dict[str, Any]) -> None:
    """But for the empty parameter's, which has no slice and so no state in the store."""
    assert left["param_groups"] == right["param_groups"]
    empty = [name for name, _ in Odd().named_parameters()].index("empty")
    assert {*left["state"], empty} == {*right["state"], empty} or left["state"] == right["state"] == {}
    for number in left["state"].keys() - {empty}:
        one, other = left["state"][number], right["state"][number]
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            assert tensor.dtype == other[name].dtype, name
            assert torch.equal(tensor, other[name]), (number, name)


@pytest.mark.parametrize("case", CASES)
def test_state_dict_is_plain_torchs(store: psstore.Store, case: str) -> None:
    plain, stored = Odd(), Odd()
    local, outer = CASES[case](plain.parameters(), foreach=False), distributed(stored, store, CASES[case])
    outer.param_groups[0]["foreach"] = False
    assert_same_state(outer.state_dict(), local.state_dict())
    for model, optimizer in ((plain, local), (stored, outer)):
        train(model, optimizer)
    assert_same_state(outer.state_dict(), local.state_dict())
    assert not outer.state


@pytest.mark.parametrize("case", CASES)
def test_what_plain_torch_began_goes_on_in_the_store(store: psstore.Store, case: str) -> None:
    plain, stored = Odd(), Odd(seed=5)
    local = CASES[case](plain.parameters(), foreach=False)
    train(plain, local)
    stored.load_state_dict(plain.state_dict())
    outer = distributed(stored, store, CASES[case])
    outer.load_state_dict(saved(local.state_dict()))
    for model, optimizer in ((plain, local), (stored, outer)):
        train(model, optimizer, seed=2)
    assert_same_bits(plain, stored)


@pytest.mark.parametrize("case", CASES)
def test_what_the_store_began_goes_on_in_plain_torch(store: psstore.Store, case: str) -> None:
    plain, stored, moved = Odd(), Odd(), Odd(seed=5)
    local, outer = CASES[case](plain.parameters(), foreach=False), distributed(stored, store, CASES[case])
    for model, optimizer in ((plain, local), (stored, outer)):
        train(model, optimizer)
    moved.load_state_dict(stored.state_dict())
    other = CASES[case](moved.parameters(), foreach=False)
    other.load_state_dict(saved(outer.state_dict()))
    for model, optimizer in ((plain, local), (moved, other)):
        train(model, optimizer, seed=2)
    assert_same_bits(plain, moved)


@pytest.mark.parametrize("case", CASES)
def test_one_store_goes_on_where_another_stopped(store: psstore.Store, case: str) -> None:
    """As after a restart: weights before the optimizer is made, state after."""
    through, resumed = Odd(), Odd(seed=5)
    outer = distributed(through, store, CASES[case])
    train(through, outer)
    weights, state = saved(through.state_dict()), saved(outer.state_dict())
    train(through, outer, seed=2)
    with psstore.connect("local://") as second:
        resumed.load_state_dict(weights)
        again = distributed(resumed, second, CASES[case])
        again.load_state_dict(state)
        train(resumed, again, seed=2)
    assert_same_bits(through, resumed)


def test_a_checkpoint_loaded_before_wrapping_counts(store: psstore.Store) -> None:
    plain, stored = Odd(), Odd()
    local = AdamW(plain.parameters(), lr=0.01, foreach=False)
    train(plain, local)
    stored.load_state_dict(plain.state_dict())
    inner = AdamW(stored.parameters(), lr=0.01)
    inner.load_state_dict(local.state_dict())
    outer = psstore.torch.DistributedOptimizer(inner, store, stored.named_parameters())
    assert not inner.state
    for model, optimizer in ((plain, local), (stored, outer)):
        train(model, optimizer, seed=2)
    assert_same_bits(plain, stored)


def test_a_checkpoint_loaded_into_the_wrapped_optimizer_counts(store: psstore.Store) -> None:
    plain, stored = Odd(), Odd()
    local = AdamW(plain.parameters(), lr=0.01, foreach=False)
    outer = distributed(stored, store, partial(AdamW, lr=0.01))
    train(plain, local)
    train(stored, outer, seed=7)
    stored.load_state_dict(plain.state_dict())
    outer.optimizer.load_state_dict(local.state_dict())
    with pytest.warns(UserWarning, match="edited"):
        train(stored, outer, seed=2)
    train(plain, local, seed=2)
    assert_same_bits(plain, stored)


def test_model_optimizer_and_schedule_go_on_after_loading_in_the_middle(store: psstore.Store) -> None:
    """Weights loaded into a model that trains already are rank 0's edit."""
    plain, stored = Odd(), Odd()
    local = SGD(plain.parameters(), lr=0.1, momentum=0.9, foreach=False)
    outer = distributed(stored, store, partial(SGD, lr=0.1, momentum=0.9))
    schedules = [lr_scheduler.StepLR(optimizer, 2, gamma=0.5) for optimizer in (local, outer)]
    train(plain, local)
    schedules[0].step()
    train(stored, outer, seed=9)
    for there, here in ((stored, plain), (outer, local), (schedules[1], schedules[0])):
        there.load_state_dict(saved(here.state_dict()))
    outer.publish()
    for model, optimizer, schedule in zip((plain, stored), (local, outer), schedules, strict=True):
        train(model, optimizer, 2, seed=2)
        schedule.step()
        train(model, optimizer, 2, seed=3)
    assert_same_bits(plain, stored)


@pytest.mark.parametrize("case", CASES)
def test_loading_ones_own_state_at_the_start_changes_nothing(store: psstore.Store, case: str) -> None:
    """As accelerate does, to move it to a device."""
    plain, stored = Odd(), Odd()
    local, outer = CASES[case](plain.parameters(), foreach=False), distributed(stored, store, CASES[case])
    outer.load_state_dict(outer.state_dict())
    for model, optimizer in ((plain, local), (stored, outer)):
        train(model, optimizer)
    assert_same_bits(plain, stored)


def test_loading_a_fresh_state_forgets_the_old_one(store: psstore.Store) -> None:
    plain, stored = Odd(), Odd()
    outer = distributed(stored, store, partial(AdamW, lr=0.01))
    fresh = saved(outer.state_dict())
    train(stored, outer)
    plain.load_state_dict(stored.state_dict())
    outer.load_state_dict(fresh)
    local = AdamW(plain.parameters(), lr=0.01, foreach=False)
    for model, optimizer in ((plain, local), (stored, outer)):
        train(model, optimizer, seed=2)
    assert_same_bits(plain, stored)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_state_of_half_precision_is_kept_in_full(store: psstore.Store, dtype: torch.dtype) -> None:
    """The store steps in float32; its state goes into the checkpoint and comes back as it was."""
    stored = Odd(dtype=dtype)
    outer = distributed(stored, store, partial(Adam, lr=0.01))
    for inputs in batches(STEPS, dtype=dtype):
        outer.zero_grad()
        backward(stored, inputs)
        outer.step()
    before = saved(outer.state_dict())
    assert {state["exp_avg"].dtype for state in before["state"].values()} == {torch.float32}
    outer.load_state_dict(before)
    assert_same_state(outer.state_dict(), before)
    Adam(Odd(dtype=dtype).parameters()).load_state_dict(before)


def test_state_of_a_frozen_parameter_waits_until_it_is_trained(store: psstore.Store) -> None:
    plain, stored = Odd(), Odd()
    local = Adam(plain.parameters(), lr=0.01, foreach=False)
    train(plain, local)
    stored.load_state_dict(plain.state_dict())
    stored.first.requires_grad_(False)
    outer = distributed(stored, store, partial(Adam, lr=0.01))
    outer.load_state_dict(saved(local.state_dict()))
    outer.param_groups[0]["foreach"] = False
    assert_same_state(outer.state_dict(), local.state_dict())
    stored.first.requires_grad_(True)
    for model, optimizer in ((plain, local), (stored, outer)):
        train(model, optimizer, seed=2)
    assert not outer.state
    assert_same_bits(plain, stored)


def test_only_one_worker_saves_and_every_worker_loads() -> None:
    models = [Odd(seed=rank) for rank in range(2)]
    plain = Odd(seed=0)
    local = AdamW(plain.parameters(), lr=0.01)
    train(plain, local)
    checkpoint = saved(local.state_dict())
    train(plain, local, seed=2)

    def work(store: psstore.Store, rank: int) -> None:
        outer = distributed(models[rank], store, partial(AdamW, lr=0.5 if rank else 0.01))
        train(models[rank], outer)
        if rank == 0:
            assert_same_state(outer.state_dict(), checkpoint)
        outer.load_state_dict(checkpoint)
        train(models[rank], outer, seed=2)

    on_each_worker(2, work, shards=2)
    for model in models:
        assert_same_bits(model, plain)


def test_hooks_of_state_dicts_are_torchs(store: psstore.Store) -> None:
    outer = distributed(Odd(), store, partial(SGD, lr=0.1))
    seen: list[str] = []
    outer.register_state_dict_pre_hook(lambda _: seen.append("save"))
    outer.register_state_dict_post_hook(lambda _, state: {**state, "extra": 1})
    outer.register_load_state_dict_pre_hook(lambda _, state: seen.append("load") or {**state, "state": {}})  # type: ignore[func-returns-value]
    outer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    state = outer.state_dict()
    assert state["extra"] == 1
    outer.load_state_dict(state)
    assert seen == ["save", "load", "loaded"]


def test_state_of_another_class_is_refused_by_name(store: psstore.Store) -> None:
    plain, stored = Odd(), Odd()
    local = SGD(plain.parameters(), lr=0.1, momentum=0.9)
    train(plain, local)
    outer = distributed(stored, store, partial(Adam, lr=0.1))
    with pytest.raises(BadArgument, match="'adam' has no state 'momentum_buffer'"):
        outer.load_state_dict(local.state_dict())


def test_other_groups_are_refused_as_torch_does(store: psstore.Store) -> None:
    stored = Odd()
    outer = distributed(stored, store, partial(SGD, lr=0.1))
    with pytest.raises(ValueError, match="doesn't match the size"):
        outer.load_state_dict(SGD([stored.first], lr=0.1).state_dict())
