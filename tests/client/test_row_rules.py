"""Update rules of rows: what they compute, and the hyper-parameters that they take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import psstore
from psstore.errors import BadHyper

pytestmark = pytest.mark.one_loop

F32 = np.float32
DIM = 5


def stepped_by_ftrl(value: Any, sums: Any, linear: Any, gradient: Any, hypers: Mapping[str, float]) -> Any:
    """TensorFlow's ComputeFtrl with Keras' beta, in float64; changes sums and linear."""
    lr, l1, power = hypers["lr"], hypers["l1"], -hypers["lr_power"]
    before = sums**power
    sums += np.square(gradient, dtype=np.float64)
    linear += gradient + 2 * hypers["l2_shrinkage"] * value - (sums**power - before) / lr * value
    return (np.clip(linear, -l1, l1) - linear) / (sums**power / lr + 2 * hypers["l2"] + hypers["beta"] / lr)


FTRL_HYPERS = {"lr": 0.1, "lr_power": -0.5, "l1": 0.0, "l2": 0.0, "l2_shrinkage": 0.0, "beta": 0.0}


@pytest.mark.parametrize(
    "options", [{}, {"l1": 0.8}, {"l2": 0.5, "beta": 1.0}, {"l2_shrinkage": 0.1, "lr_power": -0.3}, {"lr_power": 0.0}]
)
def test_ftrl_steps_as_tensorflow_says(options: dict[str, float]) -> None:
    hypers = {**FTRL_HYPERS, **options}
    with psstore.connect("local://?shards=2", rank=0, num_workers=1) as store:
        store.create_table("t", dim=DIM, rule="ftrl", init="normal(0, 1)")
        ids = np.arange(40)
        value = store.pull_rows("t", ids).astype(np.float64)
        sums, linear = np.full((40, DIM), 0.1), np.zeros((40, DIM))
        for step in range(1, 5):
            gradient = np.random.default_rng(step).standard_normal((40, DIM), dtype=F32)
            store.push_rows("t", ids, gradient)
            store.commit(hypers)
            value = stepped_by_ftrl(value, sums, linear, gradient, hypers)
        found = store.pull_rows("t", ids)
        assert_allclose(found, value, rtol=2e-5, atol=2e-6)
        assert (found == 0).any() == ("l1" in options)


def test_ftrl_has_zero_where_it_has_no_gradient_and_no_sum() -> None:
    with psstore.connect("local://", rank=0, num_workers=1) as store:
        store.create_table("t", dim=3, rule="ftrl", init="constant(1)")
        store.push_rows("t", [1], np.array([[0, 1, 0]], F32))
        store.commit({"lr": 0.5, "initial_accumulator_value": 0.0})
        assert_array_equal(store.pull_rows("t", [1]), np.array([[0, 0.5, 0]], F32))


@pytest.mark.parametrize(
    ("rule", "hyper", "what"),
    [
        ("ftrl", {"lr": 0.0}, "'lr' is 0.0.*divides"),
        ("ftrl", {"lr": 1e-60}, "'lr' is .*divides"),
        ("ftrl", {"lr_power": 0.5}, "'lr_power' is 0.5.*0 or less"),
        ("ftrl", {"l1": -1.0}, "'l1' is negative"),
        ("ftrl", {"eps": 1.0}, "'eps'"),
        ("momentum", {"momentum": -0.5}, "'momentum' is negative"),
        ("momentum", {"nesterov": 1.0, "dampening": 0.5}, "'nesterov' needs"),
        ("momentum", {"weight_decay": 0.5}, "'weight_decay'"),
        ("sgd", {"momentum": 0.5}, "'momentum'"),
    ],
    ids=str,
)
def test_a_hyper_parameter_that_a_rule_of_rows_does_not_take_is_refused(
    rule: str, hyper: dict[str, float], what: str
) -> None:
    with psstore.connect("local://", rank=0, num_workers=1) as store:
        store.create_table("t", dim=3, rule=rule)
        with pytest.raises(BadHyper, match=what):
            store.commit(hyper)


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_a_rule_steps_as_its_formula_says(rule: str) -> None:
    """In float64, to the rounding of float32; bit for bit with torch is in tests/torch/test_embedding.py."""
    hypers = {"lr": 0.1, **({} if rule == "sgd" else {"eps": 1e-6})}
    with psstore.connect("local://?shards=2", rank=0, num_workers=1) as store:
        store.create_table("t", dim=DIM, rule=rule, init="normal(0, 1)")
        ids = np.arange(40)
        value = store.pull_rows("t", ids).astype(np.float64)
        sums, mean, square = np.zeros((40, DIM)), np.zeros((40, DIM)), np.zeros((40, DIM))
        for step in range(1, 5):
            gradient = np.random.default_rng(step).standard_normal((40, DIM), dtype=F32)
            store.push_rows("t", ids, gradient)
            store.commit(hypers)
            if rule == "sgd":
                value -= 0.1 * gradient
            elif rule == "adam":
                mean = 0.9 * mean + 0.1 * gradient
                square = 0.999 * square + 0.001 * np.square(gradient, dtype=np.float64)
                rate = 0.1 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
                value -= rate * mean / (np.sqrt(square) + 1e-6)
            else:
                squares = np.square(gradient, dtype=np.float64)
                sums += squares if rule == "adagrad" else squares.mean(axis=1, keepdims=True)
                value -= 0.1 * gradient / (np.sqrt(sums) + 1e-6)
        assert_allclose(store.pull_rows("t", ids), value, rtol=2e-5, atol=2e-6)
