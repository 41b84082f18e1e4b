"""A gradient that is made up for what has become of the value since it was taken: DC-ASGD's first-order term."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from bench.rule_case import Case

from psstore import errors
from tests.kernels.parity import Array
from tests.kernels.support import INSTRUCTION_SETS, SIZES, first_step

STRENGTH = 0.7

CASES = [
    Case("sgd", {}),
    Case("sgd", {"momentum": 0.9, "weight_decay": 0.03, "nesterov": 1.0}),
    Case("adam", {"amsgrad": 1.0}),
    Case("adamw", {}),
    Case("adagrad", {}),
    Case("rmsprop", {"momentum": 0.9, "centered": 1.0}),
]


def some(num_elems: int, dtype: str, *, seed: int) -> Array:
    drawn: Array = np.random.default_rng(seed).standard_normal(num_elems).astype(dtype)
    return drawn


def step(
    case: Case,
    value: Array,
    gradient: Array,
    *,
    base: Array | None = None,
    weight: float = 1.0,
    divisor: float = 1.0,
    instruction_set: str | None = None,
) -> list[bytes]:
    return first_step(
        case,
        value,
        [(torch.from_numpy(gradient), weight)],
        divisor=divisor,
        base=base,
        compensation=STRENGTH,
        instruction_set=instruction_set,
    )


def compensated(gradient: Array, value: Array, base: Array, strength: float = STRENGTH) -> Array:
    """As the kernel rounds it. Of float32, the last product and sum are exact in float64 but for a rounding that is far
    below one of float32; float64 has none that is finer, and a tolerance instead."""
    square = gradient.dtype.type(strength) * gradient * gradient
    wide = np.float64 if gradient.dtype == np.float32 else np.longdouble
    total = square.astype(wide) * (value - base).astype(wide) + gradient.astype(wide)
    found: Array = total.astype(gradient.dtype)
    return found


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_is_that_of_the_compensated_gradient(case: Case, instruction_set: str) -> None:
    for num_elems in SIZES:
        value, base, gradient = (some(num_elems, "float32", seed=seed) for seed in (1, 2, 3))
        made_up = compensated(gradient, value, base)
        found = step(case, value, gradient, base=base, instruction_set=instruction_set)
        assert found == step(case, value, made_up, instruction_set=instruction_set)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_compensated_gradient_is_that_of_the_formula(dtype: str) -> None:
    """Three roundings of the term, one of the sum and one of the step, each of half an ulp at most."""
    value, base, gradient = (some(4099, dtype, seed=seed) for seed in (4, 5, 6))
    (found,) = step(Case("sgd", {"lr": 1.0}), value, gradient, base=base)
    wide = [array.astype(np.longdouble) for array in (value, base, gradient)]
    term = STRENGTH * wide[2] ** 2 * (wide[0] - wide[1])
    exact = wide[0] - (wide[2] + term)
    half_ulp = np.finfo(dtype).eps / 2
    most = half_ulp * (4 * abs(term) + 2 * abs(wide[2] + term) + abs(exact))
    assert (abs(np.frombuffer(found, dtype) - exact) <= most).all()


def test_what_is_compensated_is_the_reduced_gradient() -> None:
    """Not what came: a loss scale is a weight, and would count twice in a square."""
    value, base, gradient = (some(33, "float32", seed=seed) for seed in (7, 8, 9))
    scaled = step(CASES[0], value, gradient * np.float32(1024), base=base, weight=1 / 512, divisor=2.0)
    assert scaled == step(CASES[0], value, gradient, base=base)


def test_from_the_value_itself_nothing_is_made_up() -> None:
    value, gradient = (some(33, "float32", seed=seed) for seed in (10, 11))
    assert step(CASES[0], value, gradient, base=value.copy()) == step(CASES[0], value, gradient)


@pytest.mark.parametrize("rule", ["assign", "add", "reduce"])
def test_rules_that_take_no_step_by_a_gradient_refuse_it(rule: str) -> None:
    value = np.zeros(4, np.float32)
    with pytest.raises(errors.InternalError, match="only what takes a step by its gradient"):
        step(Case(rule, {}), value, value.copy(), base=value.copy())
