"""The weighted sum of the contributions, and the plain rules, against numpy one operation at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from psstore import _core, errors
from tests.kernels.parity import Array
from tests.kernels.support import INSTRUCTION_SETS, Contributions, as_given, random, reference_sum, same_bits


def apply(
    rule: str,
    value: Array,
    contributions: Contributions,
    *,
    divisor: float = 1.0,
    instruction_set: str | None = None,
) -> Array:
    """The value after the rule, which has no hyper-parameters."""
    after: Array = value.copy()
    _core.reduce_update(
        _core.RULES[rule],
        {},
        step=1,
        value=after.data,
        state={},
        contributions=as_given(contributions),
        divisor=divisor,
        dtype=_core.DTYPES[str(value.dtype)],
        instruction_set=instruction_set,
    )
    return after


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rule", ["assign", "reduce"])
def test_contributions_are_summed_in_order_with_each_step_rounded(
    rule: str, dtype: str, num_workers: int, instruction_set: str
) -> None:
    encodings = ["float32", "bfloat16", "float16", dtype]
    for num_elems in (1, 17, 2049):
        # Runs of one encoding and changes between them: the kernel sums run by run.
        contributions = [
            (random(num_elems, encodings[(k // 3) % 4], seed=k), 0.25 + 0.7 * (k % 3)) for k in range(num_workers)
        ]
        for divisor in (1.0, 3.0):
            after = apply(
                rule,
                np.full(num_elems, np.nan, dtype),
                contributions,
                divisor=divisor,
                instruction_set=instruction_set,
            )
            assert same_bits(after, reference_sum(dtype, contributions, divisor))


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("num_workers", [1, 4])
def test_a_sum_of_negative_zeros_stays_negative(num_workers: int, instruction_set: str) -> None:
    contributions = [(torch.full((9,), -0.0), 0.5)] * num_workers
    after = apply("assign", np.ones(9, np.float32), contributions, instruction_set=instruction_set)
    assert same_bits(after, np.full(9, -0.0, np.float32))


def test_no_contribution_counts_as_positive_zero() -> None:
    assert same_bits(apply("assign", np.ones(9, np.float32), []), np.zeros(9, np.float32))


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_add_adds_the_contribution_to_the_value(instruction_set: str) -> None:
    value, grad = random(1000, "float32").numpy(), random(1000, "float32", seed=1)
    after = apply("add", value, [(grad, 1.0)], instruction_set=instruction_set)
    assert same_bits(after, value + grad.numpy())


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_memory_of_any_alignment_gives_the_same_bytes(instruction_set: str) -> None:
    num_elems = 1001
    value, grad = random(num_elems, "float32").numpy(), random(num_elems, "float32", seed=1)
    expected = apply("add", value, [(grad, 1.5)])
    for offset in range(1, 8):
        shifted = np.zeros(offset + 2 * 4 * num_elems, np.uint8)
        value_bytes, grad_bytes = shifted[offset : offset + 4 * num_elems], shifted[offset + 4 * num_elems :]
        value_bytes[:], grad_bytes[:] = value.view(np.uint8), grad.view(torch.uint8).numpy()
        _core.reduce_update(
            _core.RULES["add"],
            {},
            step=1,
            value=value_bytes.data,
            state={},
            contributions=[(grad_bytes.data, _core.DTYPES["float32"], 1.5)],
            divisor=1.0,
            dtype=_core.DTYPES["float32"],
            instruction_set=instruction_set,
        )
        assert value_bytes.tobytes() == expected.tobytes()


def test_a_float64_contribution_does_not_fit_a_float32_value() -> None:
    with pytest.raises(errors.DTypeMismatch):
        apply("assign", np.zeros(4, np.float32), [(random(4, "float64"), 1.0)])


def test_a_value_in_half_precision_is_refused() -> None:
    with pytest.raises(errors.DTypeMismatch):
        apply("assign", np.zeros(4, np.float16), [])


def test_a_contribution_of_another_size_is_refused() -> None:
    with pytest.raises(errors.SizeMismatch, match="12 bytes, expected 16"):
        apply("assign", np.zeros(4, np.float32), [(random(3, "float32"), 1.0)])


def test_an_instruction_set_that_the_machine_lacks_is_refused_with_those_it_has() -> None:
    with pytest.raises(errors.BadArgument, match="plain"):
        apply("assign", np.zeros(4, np.float32), [], instruction_set="mmx")


def test_instruction_sets_end_with_the_plain_one() -> None:
    assert INSTRUCTION_SETS[-1] == "plain"
    assert len(set(INSTRUCTION_SETS)) == len(INSTRUCTION_SETS)
