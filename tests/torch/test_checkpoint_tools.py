"""torch.distributed.checkpoint.state_dict asks for optimizer state by a step that is none: training goes on as if
nobody had asked, and the state is all there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, RMSprop

import psstore
from psstore.torch import DistributedOptimizer
from tests.torch.support import Odd, OptimizerFactory, assert_same_bits, backward, batches, distributed, on_each_worker

pytestmark = [
    pytest.mark.usefixtures("exact"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

STEPS = 3

CASES: dict[str, OptimizerFactory] = {
    "sgd": partial(SGD, lr=0.1),
    "sgd momentum": partial(SGD, lr=0.05, momentum=0.9),
    "adam": partial(Adam, lr=0.01),
    "adamw amsgrad": partial(AdamW, lr=0.01, amsgrad=True),
    "adagrad": partial(Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "rmsprop": partial(RMSprop, lr=0.01, momentum=0.9),
    "rmsprop centered": partial(RMSprop, lr=0.01, centered=True),
    "nadam, on the worker": partial(NAdam, lr=0.01),
}

Ask = Callable[[torch.nn.Module, torch.optim.Optimizer], object]


def get_and_set(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))


def get_and_set_flat(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    held = get_optimizer_state_dict(model, optimizer, options=flat)
    set_optimizer_state_dict(model, optimizer, held, options=flat)


ASKS: dict[str, Ask] = {"get": get_optimizer_state_dict, "get and set": get_and_set, "flat": get_and_set_flat}


def train(model: Odd, optimizer: torch.optim.Optimizer, *, seed: int = 1) -> None:
    for inputs in batches(STEPS, seed=seed):
        backward(model, inputs)
        optimizer.step()
        optimizer.zero_grad()


def tensors_of(state_dict: dict[str, Any]) -> dict[tuple[str, str], torch.Tensor]:
    """By parameter and name, but for the empty parameter's, which has no slice and so no steps in the store."""
    return {
        (parameter, name): value
        for parameter, state in state_dict["state"].items()
        for name, value in state.items()
        if parameter != "empty"
    }


@pytest.mark.parametrize(
    ("case", "ask"), [*((case, "get and set") for case in CASES), ("adam", "get"), ("adam", "flat")]
)
def test_asking_in_the_middle_changes_no_bit(store: psstore.Store, case: str, ask: str) -> None:
    asked, undisturbed = Odd(), Odd()
    with psstore.connect("local://") as second:
        for model, connection in ((asked, store), (undisturbed, second)):
            optimizer = distributed(model, connection, CASES[case])
            train(model, optimizer)
            if model is asked:
                ASKS[ask](model, optimizer)
            train(model, optimizer, seed=2)
    assert_same_bits(asked, undisturbed)


@pytest.mark.parametrize("case", [case for case in CASES if case != "nadam, on the worker"])
def test_asking_before_training_changes_no_bit(store: psstore.Store, case: str) -> None:
    asked, undisturbed = Odd(), Odd()
    with psstore.connect("local://") as second:
        for model, connection in ((asked, store), (undisturbed, second)):
            optimizer = distributed(model, connection, CASES[case])
            before = connection.round
            if model is asked:
                get_and_set_flat(model, optimizer)
            assert connection.round == before
            train(model, optimizer, seed=2)
    assert_same_bits(asked, undisturbed)


@pytest.mark.parametrize("overlap", ["backward", "none", "eager"])
@pytest.mark.parametrize("before", [True, False])
def test_one_of_two_workers_may_ask(overlap: Any, before: bool) -> None:
    asked, undisturbed = ([Odd(), Odd()] for _ in range(2))

    def work(store: psstore.Store, rank: int, *, models: list[Odd]) -> None:
        model = models[rank]
        inner = Adam(model.parameters(), lr=0.01)
        optimizer = DistributedOptimizer(inner, store, model.named_parameters(), overlap=overlap)
        asks = models is asked and rank == 1
        if asks and before:
            get_optimizer_state_dict(model, optimizer)
        train(model, optimizer, seed=rank)
        if asks:
            get_and_set(model, optimizer)
        train(model, optimizer, seed=2 + rank)

    for models in (asked, undisturbed):
        on_each_worker(2, partial(work, models=models))
    assert_same_bits(asked[0], undisturbed[0])
    assert_same_bits(asked[1], undisturbed[1])


def test_asking_averages_nothing_and_steps_no_worker_alone() -> None:
    models = [Odd(), Odd()]

    def work(store: psstore.Store, rank: int) -> None:
        inner = Adam(models[rank].parameters(), lr=0.01)
        optimizer = DistributedOptimizer(inner, store, models[rank].named_parameters(), mode="average", every=2)
        if rank:
            get_optimizer_state_dict(models[rank], optimizer)
            assert not inner.state
        train(models[rank], optimizer, seed=rank)
        optimizer.synchronize()
        assert {state["step"].item() for state in inner.state.values()} == {STEPS}

    on_each_worker(2, work)
    assert_same_bits(*models)


@pytest.mark.parametrize("case", CASES)
def test_the_state_is_what_plain_torchs_would_be(store: psstore.Store, case: str) -> None:
    plain, stored = Odd(), Odd()
    factory = partial(CASES[case], foreach=False)
    local, outer = factory(plain.parameters()), distributed(stored, store, factory)
    for model, optimizer in ((plain, local), (stored, outer)):
        train(model, optimizer)
    expected = tensors_of(get_optimizer_state_dict(plain, local))
    found = tensors_of(get_optimizer_state_dict(stored, outer))
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert torch.equal(value, expected[key]), key


@pytest.mark.parametrize("case", CASES)
def test_before_training_it_has_tensors_to_load_into(store: psstore.Store, case: str) -> None:
    plain, stored = Odd(), Odd()
    local, outer = CASES[case](plain.parameters()), distributed(stored, store, CASES[case])
    expected = tensors_of(get_optimizer_state_dict(plain, local))
    found = tensors_of(get_optimizer_state_dict(stored, outer))
    assert {key: value.shape for key, value in found.items()} == {key: value.shape for key, value in expected.items()}
    if case != "nadam, on the worker":  # there only a step makes it
        assert all(value == 0 for (_, name), value in found.items() if name == "step")


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("case", ["adam", "sgd momentum", "nadam, on the worker"])
def test_a_checkpoint_goes_on_in_another_store(store: psstore.Store, case: str, flat: bool, tmp_path: Path) -> None:
    checkpoints: Any = import_module("torch.distributed.checkpoint")
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    through, resumed = Odd(), Odd(seed=5)
    outer = distributed(through, store, CASES[case])
    train(through, outer)
    held = get_optimizer_state_dict(through, outer, options=options)
    checkpoints.save({"model": through.state_dict(), "optimizer": held}, checkpoint_id=tmp_path, no_dist=True)
    train(through, outer, seed=2)
    with psstore.connect("local://") as second:
        again = distributed(resumed, second, CASES[case])
        loaded = {
            "model": resumed.state_dict(),
            "optimizer": get_optimizer_state_dict(resumed, again, options=options),
        }
        checkpoints.load(loaded, checkpoint_id=tmp_path, no_dist=True)
        resumed.load_state_dict(loaded["model"])
        set_optimizer_state_dict(resumed, again, loaded["optimizer"], options=options)
        again.publish()
        train(resumed, again, seed=2)
    assert_same_bits(through, resumed)


def test_what_was_asked_for_is_gone_with_the_next_step(store: psstore.Store) -> None:
    model = Odd()
    optimizer = distributed(model, store, CASES["adam"])
    get_optimizer_state_dict(model, optimizer)
    assert optimizer.state[model.bias].keys() == {"step", "exp_avg", "exp_avg_sq"}
    train(model, optimizer)
    assert not optimizer.state
    assert optimizer.state_dict()["state"][0]["step"] == STEPS
