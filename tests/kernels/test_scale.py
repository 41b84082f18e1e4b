"""The scale: a reduced gradient multiplied by one factor, with one rounding, before the rule sees it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from bench.rule_case import Case
from hypothesis import given

from psstore import _core
from tests.kernels.parity import Array
from tests.kernels.support import (
    INSTRUCTION_SETS,
    SIZES,
    Contributions,
    as_given,
    few_examples,
    first_step,
    random,
    random_contributions,
    reference_sum,
    same_bits,
    seeds,
)

DIVISOR = 3.0

CASES = [
    Case("assign", {}),
    Case("add", {}),
    Case("sgd", {}),
    Case("sgd", {"momentum": 0.9, "weight_decay": 0.03, "nesterov": 1.0}),
    Case("adam", {"amsgrad": 1.0}),
    Case("adamw", {}),
    Case("adagrad", {}),
    Case("rmsprop", {"momentum": 0.9, "centered": 1.0}),
    Case("reduce", {}),
]


def reduced(contributions: Contributions, dtype: str, *, scale: float) -> Array:
    """By rule 'reduce', which leaves nothing of the value."""
    nothing = np.full(contributions[0][0].numel(), np.nan, dtype)
    value, *_ = first_step(Case("reduce", {}), nothing, contributions, scale=scale)
    return np.frombuffer(value, dtype)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@given(seed=seeds)
@few_examples
def test_a_scaled_step_is_the_step_of_the_product_rounded_once(dtype: str, instruction_set: str, seed: int) -> None:
    scale = np.random.default_rng(seed).uniform(0, 2)
    for num_elems in SIZES:
        value = random(num_elems, dtype, seed=seed).numpy()
        contributions = random_contributions(num_elems, dtype, seed=seed)
        product = reference_sum(dtype, contributions, DIVISOR) * np.dtype(dtype).type(scale)
        for case in CASES:
            scaled = first_step(
                case, value, contributions, divisor=DIVISOR, scale=scale, instruction_set=instruction_set
            )
            assert scaled == first_step(case, value, [(torch.from_numpy(product), 1.0)])


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "float16"])
@given(seed=seeds)
@few_examples
def test_a_sole_contribution_is_scaled_too(encoding: str, instruction_set: str, seed: int) -> None:
    for num_elems in SIZES:
        grad = random(num_elems, encoding, seed=seed)
        nothing = np.zeros(num_elems, np.float32)
        value, *_ = first_step(Case("reduce", {}), nothing, [(grad, 1.0)], scale=0.1, instruction_set=instruction_set)
        assert value == (grad.float().numpy() * np.float32(0.1)).tobytes()


def test_scaling_leaves_the_contribution_as_it_came() -> None:
    grad = random(4099, "float32")
    before = grad.clone()
    _core.reduce_update(
        _core.RULES["reduce"],
        {},
        step=1,
        value=np.zeros(4099, np.float32).data,
        state={},
        contributions=as_given([(grad, 1.0)]),
        divisor=1.0,
        dtype=_core.DTYPES["float32"],
        scale=0.1,
    )
    assert torch.equal(grad, before)


def test_a_scale_of_one_leaves_every_number_as_it_is() -> None:
    numbers = np.array([0.0, -0.0, 2.0**-149, -(2.0**-149), 2.0**127, np.inf, -np.inf], np.float32)
    for contributions in ([(torch.from_numpy(numbers), 1.0)], [(torch.from_numpy(numbers / 2), 1.0)] * 2):
        expected = reference_sum("float32", contributions, 1.0)
        assert same_bits(reduced(contributions, "float32", scale=1.0), expected)


def test_a_scale_of_zero_keeps_the_sign_and_what_is_not_finite() -> None:
    numbers = torch.tensor([1.0, -1.0, torch.inf, torch.nan])
    found = reduced([(numbers, 1.0)], "float32", scale=0.0)
    assert same_bits(found[:2], np.array([0.0, -0.0], np.float32))
    assert np.isnan(found[2:]).all()


@given(seed=seeds)
@few_examples
def test_torchs_clipping_factor_as_scale_gives_the_step_of_a_gradient_clipped_by_torch(seed: int) -> None:
    case = Case("sgd", {"momentum": 0.9, "weight_decay": 0.03})
    value, grad = random(4099, "float32", seed=seed), random(4099, "float32", seed=seed + 1)
    clipped = torch.nn.Parameter(value.clone())
    clipped.grad = grad.clone()
    total = torch.nn.utils.clip_grad_norm_([clipped], max_norm=1.0)
    factor = float(torch.clamp(1.0 / (total + 1e-6), max=1.0))  # torch.nn.utils.clip_grads_with_norm_
    assert 0 < factor < 1
    assert first_step(case, value.numpy(), [(grad, 1.0)], scale=factor) == first_step(
        case, value.numpy(), [(clipped.grad, 1.0)]
    )
