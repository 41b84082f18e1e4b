"""Encoded contributions: what a shard takes as one, what it makes of it, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from psstore import _core, errors
from tests.shard.frames import (
    Restored,
    decision,
    define,
    floats,
    initialise,
    key_of,
    norms,
    push,
    restore,
    value,
    write,
)
from tests.support.codec_reference import ENCODINGS, Floats, decoded, encode

A, B, C = key_of(1), key_of(2), key_of(3)
N = 5000
"""Elements: two blocks of the reduction and a part of one, whose last block of 256 is not whole."""


def random_floats(num_elems: int, seed: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(num_elems).astype(np.float32)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_an_encoded_contribution_counts_as_what_it_says(encoding: str) -> None:
    """Beside one of float32, in one round."""
    shard = _core.Shard(index=0)
    define(shard, 1, N)
    gradients = [random_floats(N, rank) for rank in range(2)]
    payload = encode(encoding, gradients[0])
    push(shard, {A: payload}, dtype=encoding, rank=0)
    push(shard, {A: gradients[1]}, rank=1)
    assert shard.stats()["staged_bytes"] == payload.nbytes + 4 * N
    shard.advance(decision(1, [(0, 1, 1, 1.0), (1, 1, 1, 1.0)]))
    expected = np.zeros(N, np.float32) - (decoded(encoding, payload, N) + gradients[1])
    np.testing.assert_array_equal(np.array(value(shard, A), np.float32), expected)


def test_a_norm_is_that_of_what_an_encoded_contribution_says() -> None:
    shard = _core.Shard(index=0)
    define(shard, 1, N)
    payload = encode("sign", random_floats(N, 0))
    push(shard, {A: payload}, dtype="sign")
    shard.advance(decision(1, [(0, 1, 1, 1.0)], needs_scale=True))
    _, (square,) = norms(shard, [A])
    assert square == pytest.approx(float((decoded("sign", payload, N).astype(np.float64) ** 2).sum()))


@pytest.mark.parametrize("rule", ["assign", "add"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_is_added_may_be_encoded(encoding: str, rule: str) -> None:
    shard = _core.Shard(index=0)
    define(shard, 1, 300, rule=rule)
    payload = encode(encoding, random_floats(300, 0))
    for sequence in (1, 2, 2):
        (answer,) = write(shard, "ADD", {A: payload}, dtype=encoding, sequence=sequence)
        assert answer.status == errors.OK
    said = decoded(encoding, payload, 300)
    np.testing.assert_array_equal(np.array(value(shard, A), np.float32), said + said)


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_whole_values_and_float64_tensors_are_not_written_encoded(encoding: str) -> None:
    shard = _core.Shard(index=0)
    define(shard, 1, 8, zeros=False)
    define(shard, 2, 8, rule="assign")
    define(shard, 3, 8, dtype="float64")
    payload = encode(encoding, random_floats(8, 0))
    refused = [
        *initialise(shard, {A: payload}, dtype=encoding),
        *write(shard, "ASSIGN", {B: payload}, dtype=encoding, sequence=1),
        *push(shard, {C: payload}, dtype=encoding),
        *restore(shard, [Restored(A, 0, payload)], dtype=encoding, sequence=1, client="other"),
    ]
    assert [answer.status for answer in refused] == [errors.DTypeMismatch.code] * 4


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_payload_of_the_wrong_size_is_refused_before_memory_is_allocated(encoding: str) -> None:
    shard = _core.Shard(index=0)
    define(shard, 1, 300)
    idle = shard.stats()["pool_bytes"]
    for size in (0 if encoding != "topk" else 4, 299, 8 * 301):
        (answer,) = push(shard, {A: np.zeros(size, np.uint8)}, dtype=encoding)
        assert answer.status == errors.SizeMismatch.code
    assert shard.stats()["pool_bytes"] == idle


@pytest.mark.parametrize("indices", [(2, 1), (1, 1), (0, 8)])
def test_indices_that_do_not_ascend_or_are_out_of_range_are_refused(indices: Sequence[int]) -> None:
    shard = _core.Shard(index=0)
    define(shard, 1, [8, 8])
    wrong = np.array([*indices, 0, 0], np.uint32).view(np.uint8)
    right = np.array([0, 7, 0, 0], np.uint32).view(np.uint8)
    answers = push(shard, {key_of(1, 0): wrong, key_of(1, 1): right}, dtype="topk")
    assert [answer.status for answer in answers] == [errors.BadArgument.code, errors.OK]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_is_not_finite_is_refused_where_the_store_refuses_it(encoding: str) -> None:
    x = floats(*range(300))
    x[299] = np.nan
    for refuses in (False, True):
        shard = _core.Shard(index=0, refuse_non_finite=refuses)
        define(shard, 1, [300, 300])
        fine = push(shard, {key_of(1, 0): encode(encoding, floats(*range(300)))}, dtype=encoding)
        bad = push(shard, {key_of(1, 1): encode(encoding, x)}, dtype=encoding)
        assert fine[0].status == errors.OK
        assert bad[0].status == (errors.NonFinite.code if refuses else errors.OK)


def test_a_scale_that_only_its_codes_make_infinite_is_not_finite() -> None:
    shard = _core.Shard(index=0, refuse_non_finite=True)
    define(shard, 1, 1)
    payload = np.concatenate([np.array([3e38], np.float32).view(np.uint8), np.array([127], np.uint8)])
    (answer,) = push(shard, {A: payload}, dtype="int8")
    assert answer.status == errors.NonFinite.code
