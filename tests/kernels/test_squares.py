"""The sum of squares of the reduced gradient: the same bits everywhere, and as near to the true sum as can be told."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given

from psstore import _core, errors
from tests.kernels.parity import Array
from tests.kernels.support import (
    ENCODINGS,
    INSTRUCTION_SETS,
    SIZES,
    Contributions,
    as_given,
    at_odd_addresses,
    few_examples,
    random,
    random_contributions,
    reference_sum,
    seeds,
)

NUM_LANES = 32
"""Element i belongs to partial sum i modulo this (csrc/kernels/squares.h)."""

DIVISOR = 3.0


def squares(
    contributions: Contributions,
    dtype: str,
    *,
    divisor: float = 1.0,
    odd: bool = False,
    instruction_set: str | None = None,
) -> float:
    return _core.reduced_squares(
        num_elems=contributions[0][0].numel(),
        contributions=at_odd_addresses(contributions) if odd else as_given(contributions),
        divisor=divisor,
        dtype=_core.DTYPES[dtype],
        instruction_set=instruction_set,
    )


def sum_by_lanes(gradient: Array) -> float:
    """The additions of the kernel in its order, one row of lanes at a time."""
    wide = gradient.astype(np.float64)
    rows = np.pad(wide * wide, (0, -wide.size % NUM_LANES)).reshape(-1, NUM_LANES)
    lanes = np.zeros(NUM_LANES)
    for row in rows:
        lanes = lanes + row
    while lanes.size > 1:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    return float(lanes[0])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@given(seed=seeds)
@few_examples
def test_squares_are_added_in_the_same_order_on_every_instruction_set(dtype: str, seed: int) -> None:
    for num_elems in SIZES:
        contributions = random_contributions(num_elems, dtype, seed=seed)
        expected = sum_by_lanes(reference_sum(dtype, contributions, DIVISOR))
        for instruction_set in INSTRUCTION_SETS:
            for odd in (False, True):
                found = squares(contributions, dtype, divisor=DIVISOR, odd=odd, instruction_set=instruction_set)
                assert found == expected


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@given(seed=seeds)
@few_examples
def test_a_sole_contribution_of_any_encoding_is_squared_as_it_is(dtype: str, instruction_set: str, seed: int) -> None:
    for encoding in ENCODINGS[dtype]:
        for num_elems in SIZES:
            grad = random(num_elems, encoding, seed=seed)
            found = squares([(grad, 1.0)], dtype, odd=True, instruction_set=instruction_set)
            assert found == sum_by_lanes(grad.double().numpy())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@given(seed=seeds)
@few_examples
def test_squares_are_near_the_exact_sum(dtype: str, seed: int) -> None:
    for num_elems in (1, 17, 4099, 100_003):
        contributions = random_contributions(num_elems, dtype, seed=seed)
        wide = reference_sum(dtype, contributions, DIVISOR).astype(np.float64)
        exact = math.fsum(wide * wide)
        # No term is negative, so each addition on the way of an element, and its square, adds at most half an ulp
        # of relative error: one per row, five for the lanes, one for the square (and one for numpy's).
        roundings = math.ceil(num_elems / NUM_LANES) + 5 + 2
        assert abs(squares(contributions, dtype, divisor=DIVISOR) - exact) <= roundings * 2.0**-53 * exact


@given(seed=seeds)
@few_examples
def test_the_root_of_the_squares_is_torchs_norm(seed: int) -> None:
    grad = random(4099, "float64", seed=seed)
    norm = math.sqrt(squares([(grad, 1.0)], "float64"))
    # torch sums in an order of its own: 4099 roundings each at most, halved by the root.
    assert norm == pytest.approx(float(torch.linalg.vector_norm(grad)), rel=4099 * 2.0**-53)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_one_number_that_is_not_finite_shows_in_the_sum(dtype: str, instruction_set: str) -> None:
    for num_elems in SIZES[1:]:
        for position in {0, num_elems // 2, num_elems - 1}:
            for bad in (torch.nan, torch.inf, -torch.inf):
                grad = random(num_elems, dtype)
                grad[position] = bad
                found = squares([(grad, 1.0)], dtype, instruction_set=instruction_set)
                assert math.isnan(found) if math.isnan(bad) else found == math.inf


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_squares_of_the_largest_floats_do_not_overflow(instruction_set: str) -> None:
    largest = torch.full((4099,), torch.finfo(torch.float32).max)
    found = squares([(largest, 1.0)], "float32", instruction_set=instruction_set)
    assert found == pytest.approx(4099 * float(largest[0]) ** 2, rel=2.0**-40)


def test_no_contribution_has_no_squares() -> None:
    assert _core.reduced_squares(num_elems=7, contributions=[], divisor=1.0, dtype=_core.DTYPES["float32"]) == 0.0


def test_what_does_not_fit_the_gradient_is_refused() -> None:
    grad = random(4, "float64")
    with pytest.raises(errors.DTypeMismatch, match="float64"):
        squares([(grad, 1.0)], "float32")
    with pytest.raises(errors.DTypeMismatch, match="half"):
        squares([(grad, 1.0)], "bfloat16")
    with pytest.raises(errors.SizeMismatch, match="32 bytes, expected 40"):
        _core.reduced_squares(num_elems=5, contributions=as_given([(grad, 1.0)]), divisor=1.0, dtype=2)
    with pytest.raises(errors.BadArgument, match="num_elems"):
        _core.reduced_squares(num_elems=-1, contributions=[], divisor=1.0, dtype=2)
