"""Half precision as torch has it, over every bit pattern; and the check for finite values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from psstore import _core
from tests.kernels.support import INSTRUCTION_SETS, TORCH_DTYPES, data, name_of

HALVES = ("bfloat16", "float16")


def convert(tensor: torch.Tensor, to: str, instruction_set: str) -> torch.Tensor:
    out = torch.empty_like(tensor, dtype=TORCH_DTYPES[to])
    convert_into(out, tensor, instruction_set)
    return out


def convert_into(out: torch.Tensor, tensor: torch.Tensor, instruction_set: str) -> None:
    source, to = (_core.DTYPES[name_of(each)] for each in (tensor, out))
    _core.convert(data(tensor), source, data(out), to, instruction_set=instruction_set)


def assert_same(left: torch.Tensor, right: torch.Tensor) -> None:
    """Same bits, or both NaN: a NaN's payload is not promised."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    differ = (left.view(bits) != right.view(bits)) & ~(left.isnan() & right.isnan())
    assert left.dtype == right.dtype
    assert not differ.any(), f"{int(differ.sum())} differ, the first at {int(differ.nonzero()[0])}"


def every_half(dtype: str) -> torch.Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(TORCH_DTYPES[dtype])


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("wide", ["float32", "float64"])
@pytest.mark.parametrize("half", HALVES)
def test_widening_is_exact_for_every_pattern(half: str, wide: str, instruction_set: str) -> None:
    every = every_half(half)
    assert_same(convert(every, wide, instruction_set), every.to(TORCH_DTYPES[wide]))


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("half", HALVES)
def test_rounding_is_to_nearest_even_around_every_half(half: str, instruction_set: str) -> None:
    exact = every_half(half).float()
    exact = exact[exact.isfinite()].sort().values
    midpoints = ((exact[:-1].double() + exact[1:].double()) / 2).float()  # exact: a half has few digits
    beyond = exact[-1] + (exact[-1] - exact[-2]) / 2 if half == "float16" else torch.tensor(torch.inf)
    points = torch.cat([exact, midpoints, beyond.reshape(1), -beyond.reshape(1)])
    below, above = (points.nextafter(torch.tensor(end)) for end in (-torch.inf, torch.inf))
    numbers = torch.cat([points, below, above, torch.tensor([torch.nan, torch.inf, -torch.inf])])
    assert_same(convert(numbers, half, instruction_set), numbers.to(TORCH_DTYPES[half]))


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("half", HALVES)
def test_rounding_is_torchs_for_random_patterns(half: str, instruction_set: str) -> None:
    patterns = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    numbers = torch.from_numpy(patterns.view(np.float32))
    assert_same(convert(numbers, half, instruction_set), numbers.to(TORCH_DTYPES[half]))
    doubles = torch.randn(1 << 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert_same(convert(doubles, half, instruction_set), doubles.to(TORCH_DTYPES[half]))


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("source", TORCH_DTYPES)
@pytest.mark.parametrize("to", TORCH_DTYPES)
def test_conversion_of_any_number_of_elements_ends_with_the_last(to: str, source: str, instruction_set: str) -> None:
    """Loops take a cache line of halves at a time, or a register; what is left over is no less exact."""
    numbers = torch.randn(140, dtype=TORCH_DTYPES[source], generator=torch.Generator().manual_seed(0))
    for num_elems in range(numbers.numel()):
        out = torch.full((numbers.numel(),), 7.0, dtype=TORCH_DTYPES[to])
        convert_into(out[:num_elems], numbers[:num_elems], instruction_set)
        assert_same(out[:num_elems], numbers[:num_elems].to(TORCH_DTYPES[to]))
        assert (out[num_elems:] == 7.0).all()


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_one_bad_number_anywhere_is_found(dtype: str, instruction_set: str) -> None:
    for num_elems in (0, 1, 17, 2048, 4099):
        numbers = torch.full((num_elems,), torch.finfo(TORCH_DTYPES[dtype]).max, dtype=TORCH_DTYPES[dtype])
        assert all_finite(numbers, instruction_set)
        for bad in (torch.nan, torch.inf, -torch.inf):
            for position in {0, num_elems // 2, num_elems - 1} & set(range(num_elems)):
                spoiled = numbers.clone()
                spoiled[position] = bad
                assert not all_finite(spoiled, instruction_set)


def all_finite(tensor: torch.Tensor, instruction_set: str) -> bool:
    dtype = _core.DTYPES[name_of(tensor)]
    return _core.all_finite(data(tensor), dtype, instruction_set=instruction_set)
