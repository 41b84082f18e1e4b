"""Contributions that are sorted by element: numpy's median and its mean of what a trim leaves, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from psstore import _core, errors
from tests.kernels.parity import Array
from tests.kernels.support import (
    ENCODINGS,
    INSTRUCTION_SETS,
    TORCH_DTYPES,
    Contributions,
    as_given,
    few_examples,
    random,
    random_contributions,
    seeds,
)
from tests.kernels.test_squares import sum_by_lanes

SIZES = (1, 15, 33, 513)

MEMBERS = (1, 2, 3, 4, 5, 8, 9, 17, 40, _core.MAX_SORTED)
"""Those that are sorted in registers, more, and the most there may be: blocks of 512 elements down to 32."""


def reduced(
    contributions: Contributions,
    dtype: str,
    *,
    dropped: int,
    zeros: int = 0,
    divisor: float | None = None,
    instruction_set: str | None = None,
) -> Array:
    """By rule 'reduce', divided by how many are left unless something else is asked for."""
    return reduced_payloads(
        as_given(contributions),
        contributions[0][0].numel(),
        dtype,
        dropped=dropped,
        zeros=zeros,
        divisor=divisor,
        instruction_set=instruction_set,
    )


def reduced_payloads(
    payloads: Sequence[tuple[Any, int, float]],
    num_elems: int,
    dtype: str,
    *,
    dropped: int,
    zeros: int = 0,
    divisor: float | None = None,
    instruction_set: str | None = None,
) -> Array:
    """As `reduced`, of contributions as the core takes them."""
    value = np.full(num_elems, np.nan, dtype)
    _core.reduce_update(
        _core.RULES["reduce"],
        {},
        step=1,
        value=value,
        state={},
        contributions=payloads,
        divisor=len(payloads) + zeros - 2 * dropped if divisor is None else divisor,
        dtype=_core.DTYPES[dtype],
        sorts=(zeros, dropped),
        instruction_set=instruction_set,
    )
    return value


def in_total_order(rows: Array) -> Array:
    """Each column in the total order of IEEE 754, as the integers that its bits are once those below a sign that is
    set are turned."""
    kind = np.dtype(f"i{rows.itemsize}")
    bits = rows.view(kind)
    keys = np.sort(np.where(bits < 0, bits ^ np.iinfo(kind).max, bits), axis=0)
    ordered: Array = np.where(keys < 0, keys ^ np.iinfo(kind).max, keys).view(rows.dtype)
    return ordered


def mean_of_the_left(rows: Array, dropped: int) -> Array:
    """The sum in ascending order, divided once."""
    left = in_total_order(rows)[dropped : len(rows) - dropped]
    total = left[0]
    for row in left[1:]:
        total = total + row
    mean: Array = total / rows.dtype.type(len(left))
    return mean


def some_floats(members: int, num_elems: int, dtype: str, *, seed: int) -> Array:
    """With equal ones, zeros of both signs, and magnitudes that are far apart."""
    rng = np.random.default_rng(seed)
    found = rng.standard_normal((members, num_elems)) * 10.0 ** rng.integers(-3, 4, (members, num_elems))
    found[rng.random(found.shape) < 0.1] = 0.0
    found[rng.random(found.shape) < 0.1] = -0.0
    found[rng.random(found.shape) < 0.1] = 1.0
    rows: Array = found.astype(dtype)
    return rows


def given_rows(rows: Array | Sequence[Array]) -> Contributions:
    return [(torch.from_numpy(row), 1.0) for row in rows]


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("members", MEMBERS)
def test_the_mean_of_what_is_left_has_the_bits_of_numpy(members: int, dtype: str, instruction_set: str) -> None:
    for num_elems in SIZES if members < 40 else SIZES[:2]:
        rows = some_floats(members, num_elems, dtype, seed=members)
        for dropped in sorted({0, (members - 1) // 4, (members - 1) // 2}):
            found = reduced(given_rows(rows), dtype, dropped=dropped, instruction_set=instruction_set)
            assert found.tobytes() == mean_of_the_left(rows, dropped).tobytes()


@pytest.mark.parametrize("members", [3, 4])
def test_all_but_the_middle_dropped_is_the_median_of_numpy(members: int) -> None:
    rows = np.random.default_rng(members).standard_normal((members, 999), np.float32)
    found = reduced(given_rows(rows), "float32", dropped=(members - 1) // 2)
    assert found.tobytes() == np.median(rows, axis=0).tobytes()


def test_the_order_of_the_members_does_not_show() -> None:
    rows = some_floats(5, 100, "float32", seed=1)
    expected = reduced(given_rows(rows), "float32", dropped=1).tobytes()
    for order in itertools.permutations(rows):
        assert reduced(given_rows(order), "float32", dropped=1).tobytes() == expected


def test_what_is_not_finite_is_beyond_all_numbers_of_its_sign() -> None:
    rows = np.array([np.nan, -np.nan, np.inf, -np.inf, 3, 1, 2], np.float32)[:, None].repeat(2, axis=1)
    assert (reduced(given_rows(rows), "float32", dropped=2) == 2).all()
    assert (reduced(given_rows(rows), "float32", dropped=3) == 2).all()
    assert np.isnan(reduced(given_rows(rows), "float32", dropped=1)).all()
    assert (reduced(given_rows(rows[:1]), "float32", dropped=1, zeros=2) == 0).all()


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@given(seed=seeds)
@few_examples
def test_every_encoding_is_widened_and_weighted_before(dtype: str, instruction_set: str, seed: int) -> None:
    for num_elems in SIZES:
        contributions = random_contributions(num_elems, dtype, seed=seed)
        rows = np.stack(
            [np.dtype(dtype).type(np.float32(w)) * g.to(TORCH_DTYPES[dtype]).numpy() for g, w in contributions]
        )
        found = reduced(contributions, dtype, dropped=1, instruction_set=instruction_set)
        assert found.tobytes() == mean_of_the_left(rows, 1).tobytes()


@pytest.mark.parametrize("encoding", ["int8", "sign", "topk"])
@pytest.mark.parametrize("members", [3, 24, 100])
def test_what_is_encoded_counts_as_what_it_says(encoding: str, members: int) -> None:
    num_elems, number, kept = 1500, _core.DTYPES[encoding], 90
    payloads, rows = [], []
    for rank in range(members):
        payload = np.empty(_core.encoded_bytes(number, num_elems, kept), np.uint8)
        _core.encode_slice(number, random(num_elems, "float32", seed=rank).numpy(), None, payload, kept)
        said = np.empty(num_elems, np.float32)
        _core.decode_slice(number, payload, said)
        payloads.append((payload, number, 1.0))
        rows.append(said)
    value = reduced_payloads(payloads, num_elems, "float32", dropped=1)
    assert value.tobytes() == mean_of_the_left(np.stack(rows), 1).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_norm_is_that_of_what_is_left(dtype: str) -> None:
    contributions = [(random(2000, one, seed=rank), 1.0) for rank, one in enumerate(ENCODINGS[dtype] * 2)]
    found = _core.reduced_squares(
        num_elems=2000,
        contributions=as_given(contributions),
        divisor=len(contributions) - 2,
        dtype=_core.DTYPES[dtype],
        sorts=(0, 1),
    )
    assert found == sum_by_lanes(reduced(contributions, dtype, dropped=1))


@pytest.mark.parametrize(("members", "dropped"), [(1, 1), (4, 2), (_core.MAX_SORTED + 1, 1)])
def test_nobody_left_and_too_many_are_refused(members: int, dropped: int) -> None:
    rows = np.zeros((members, 2), np.float32)
    with pytest.raises(errors.InternalError, match="some have to be left"):
        reduced(given_rows(rows), "float32", dropped=dropped)
