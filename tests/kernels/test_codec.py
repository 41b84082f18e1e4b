"""Encodings: the bytes of the numpy reference on every instruction set, what they lose, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psstore import _core, errors
from tests.support.codec_reference import ENCODINGS, Bytes, Floats, decoded, encode, encoded, num_kept

INSTRUCTION_SETS = _core.instruction_sets()

SIZES = (0, 1, 7, 8, 9, 31, 255, 256, 257, 2048, 2048 + 256 + 13)
"""Around a byte of signs, a block of 256, and a block of the reduction."""

seeds = st.integers(0, 2**32 - 1)
few_examples = settings(deadline=None, max_examples=8)


def random_floats(num_elems: int, seed: int) -> Floats:
    """Of magnitudes that differ from block to block, with zeros of both signs and some that are alike, at an address
    that is no multiple of anything."""
    rng = np.random.default_rng(seed)
    memory = np.zeros(4 * num_elems + 1, np.uint8)
    x = memory[1:].view(np.float32)
    x[:] = rng.standard_normal(num_elems) * 10.0 ** rng.integers(-20, 20)
    x[rng.random(num_elems) < 0.1] = rng.choice([0.0, -0.0, 0.5, -0.5])
    return x


def decode(encoding: str, payload: Bytes, num_elems: int, instruction_set: str | None = None) -> Floats:
    out = np.full(num_elems, np.nan, np.float32)
    _core.decode_slice(_core.DTYPES[encoding], payload, out, instruction_set=instruction_set)
    return out


def assert_same(left: npt.NDArray[np.generic], right: npt.NDArray[np.generic]) -> None:
    """To the bit, but for the payload of a NaN."""
    np.testing.assert_array_equal(left, right)
    if left.dtype == np.float32:
        signs = ~np.isnan(left)
        np.testing.assert_array_equal(np.signbit(left)[signs], np.signbit(right)[signs])


# ---- the same bytes ------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@given(seed=seeds)
@few_examples
def test_payload_and_residual_are_the_references(instruction_set: str, encoding: str, seed: int) -> None:
    for num_elems in SIZES:
        source, residual = random_floats(num_elems, seed), random_floats(num_elems, seed + 1)
        x = source + residual
        payload = encode(encoding, source, residual, instruction_set=instruction_set)
        assert_same(payload, encoded(encoding, x))
        assert_same(residual, x - decoded(encoding, payload, num_elems))
        assert_same(encode(encoding, x, instruction_set=instruction_set), payload)
        assert_same(decode(encoding, payload, num_elems, instruction_set), decoded(encoding, payload, num_elems))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@given(seed=seeds)
@few_examples
def test_a_sum_of_encoded_contributions_is_that_of_what_they_say(instruction_set: str, dtype: str, seed: int) -> None:
    order = ("int8", "int8", "float32", "topk", "sign", "sign", "sign", "int8")
    for num_elems in SIZES:
        sources = [random_floats(num_elems, seed + rank) for rank in range(len(order))]
        payloads = [s if e == "float32" else encode(e, s) for e, s in zip(order, sources, strict=True)]
        plain = [
            p if e == "float32" else decoded(e, p.view(np.uint8), num_elems)
            for e, p in zip(order, payloads, strict=True)
        ]
        weights = [0.5 + rank for rank in range(len(order))]
        numbers = [_core.DTYPES[encoding] for encoding in order]
        same = list(zip(plain, [_core.DTYPES["float32"]] * len(order), weights, strict=True))
        sums = [
            _sum(contributions, num_elems, dtype, instruction_set)
            for contributions in (list(zip(payloads, numbers, weights, strict=True)), same)
        ]
        assert_same(sums[0][0], sums[1][0])
        assert sums[0][1] == sums[1][1]


def _sum(
    contributions: Sequence[tuple[npt.NDArray[np.generic], int, float]],
    num_elems: int,
    dtype: str,
    instruction_set: str,
) -> tuple[npt.NDArray[np.generic], float]:
    value = np.zeros(num_elems, dtype)
    _core.reduce_update(
        _core.RULES["add"],
        {},
        step=1,
        value=value,
        state={},
        contributions=contributions,
        divisor=3.0,
        dtype=_core.DTYPES[dtype],
        instruction_set=instruction_set,
    )
    squares = _core.reduced_squares(
        num_elems=num_elems,
        contributions=contributions,
        divisor=3.0,
        dtype=_core.DTYPES[dtype],
        instruction_set=instruction_set,
    )
    return value, squares


# ---- what is lost --------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_one_payload_loses_comes_with_the_next(encoding: str) -> None:
    """The sum of what was said is the sum of what was to be said, but for one residual and for rounding."""
    residual, said, meant = np.zeros(1000, np.float32), np.zeros(1000), np.zeros(1000)
    for seed in range(20):
        source = np.random.default_rng(seed).standard_normal(1000).astype(np.float32)
        said += decoded(encoding, encode(encoding, source, residual), 1000)
        meant += source
    np.testing.assert_allclose(said + residual, meant, atol=1e-4)


def test_int8_is_within_half_a_step() -> None:
    x = np.random.default_rng(0).standard_normal(256).astype(np.float32)
    lost = np.abs(x - decoded("int8", encode("int8", x), 256))
    assert lost.max() <= np.abs(x).max() / 127 * 0.501


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_scales_among_the_smallest_numbers_are_rounded_like_the_reference(instruction_set: str) -> None:
    """In a block that registers fill, and in one of few elements. The last three: about the smallest normal scale."""
    smallest = np.float32(np.finfo(np.float32).smallest_subnormal)
    for steps in (1, 63, 64, 127, 190, 191, 126.5 * 2**23, 127 * 2**23, 127.5 * 2**23):
        few = np.array([steps, -steps, 1, 0], np.float32) * smallest
        for x in (few, np.resize(few, 256)):
            for encoding in ("int8", "sign"):
                assert_same(encode(encoding, x, instruction_set=instruction_set), encoded(encoding, x))


def test_topk_keeps_the_first_of_equals() -> None:
    payload = np.zeros(8 * 2, np.uint8)
    _core.encode_slice(_core.DTYPES["topk"], np.array([1, -3, 3, 3], np.float32), None, payload, 2)
    assert list(payload.view(np.uint32)[:2]) == [1, 2]
    assert list(payload.view(np.float32)[2:]) == [-3.0, 3.0]


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("kept", [1, 2, 15, 16, 17, 63, 64, 65, 2047])
def test_topk_keeps_the_largest_wherever_they_lie(kept: int, instruction_set: str) -> None:
    """Of 64 runs of 32 elements: one in each, all in a few of them, and many alike."""
    spread = random_floats(2048, seed=kept)
    gathered = spread[np.argsort(-np.abs(spread))]
    alike = np.round(np.random.default_rng(kept).standard_normal(2048)).astype(np.float32)
    for x in (spread, gathered, gathered[::-1].copy(), alike):
        payload = np.zeros(8 * kept, np.uint8)
        _core.encode_slice(_core.DTYPES["topk"], x, None, payload, kept, instruction_set=instruction_set)
        indices = np.sort(np.argsort(-np.abs(x), kind="stable")[:kept])
        assert_same(payload.view(np.uint32)[:kept], indices.astype(np.uint32))
        assert_same(payload.view(np.float32)[kept:], x[indices])


@pytest.mark.parametrize("kept", [0, 5])
def test_topk_keeps_none_or_all(kept: int) -> None:
    source, residual = np.arange(5, dtype=np.float32), np.ones(5, np.float32)
    payload = np.zeros(8 * kept, np.uint8)
    _core.encode_slice(_core.DTYPES["topk"], source, residual, payload, kept)
    assert list(residual) == ([1, 2, 3, 4, 5] if kept == 0 else [0] * 5)


# ---- what is not finite --------------------------------------------------------------------------


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("encoding", ["int8", "sign"])
def test_a_block_that_is_not_finite_is_nan_and_leaves_the_residual(
    encoding: str, bad: float, instruction_set: str
) -> None:
    source, residual = np.ones(600, np.float32), np.full(600, 0.25, np.float32)
    source[300] = bad
    payload = encode(encoding, source, residual, instruction_set=instruction_set)
    said = decoded(encoding, payload, 600)
    assert np.isnan(said[256:512]).all()
    assert np.isfinite(said[:256]).all()
    assert np.isfinite(said[512:]).all()
    assert (residual[256:512] == 0.25).all()
    assert (residual[:256] != 0.25).all()


@pytest.mark.parametrize("num_elems", [9, 256])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_int8_of_the_largest_number_is_nan_as_it_would_say_infinity(instruction_set: str, num_elems: int) -> None:
    """What torch.nan_to_num makes of an infinity: 127 of its scale, which is rounded up, are beyond all numbers."""
    source, residual = np.ones(num_elems, np.float32), np.full(num_elems, 0.25, np.float32)
    source[3] = np.finfo(np.float32).max
    payload = encode("int8", source, residual, instruction_set=instruction_set)
    with np.errstate(over="ignore"):
        assert_same(payload, encoded("int8", source + np.float32(0.25)))
    assert np.isnan(decoded("int8", payload, num_elems)).all()
    assert (residual == 0.25).all()


@pytest.mark.parametrize("kept", [1, 3])
def test_topk_sends_what_is_not_finite_first_and_leaves_its_residual(kept: int) -> None:
    source, residual = np.array([5, np.nan, np.inf, 1], np.float32), np.full(4, 0.25, np.float32)
    payload = np.zeros(8 * kept, np.uint8)
    _core.encode_slice(_core.DTYPES["topk"], source, residual, payload, kept)
    assert not np.isfinite(payload.view(np.float32)[kept:]).all()
    assert list(residual[1:]) == [0.25, 0.25, 1.25]


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@given(seed=seeds)
@few_examples
def test_topk_keeps_as_many_as_were_asked_for_where_source_and_residual_are_not_numbers(
    instruction_set: str, seed: int
) -> None:
    """Any bits: whose NaN a sum becomes is up to the compiler, pass by pass."""
    kept, num_elems, untouched = 300, 70_000, 0xA5
    bits = np.random.default_rng(seed).integers(0, 1 << 32, (2, num_elems), np.uint32)
    source, residual = bits.view(np.float32)
    payload = np.full(8 * kept + 4096, untouched, np.uint8)
    _core.encode_slice(_core.DTYPES["topk"], source, residual, payload, kept, instruction_set=instruction_set)
    indices = payload[: 4 * kept].view(np.uint32).astype(np.int64)
    assert (np.diff(indices) > 0).all()
    assert indices[-1] < num_elems
    assert (payload[8 * kept :] == untouched).all()


# ---- what is refused -----------------------------------------------------------------------------


def test_sizes_follow_from_the_number_of_elements() -> None:
    sizes = {name: _core.encoded_bytes(_core.DTYPES[name], 257, 9) for name in ENCODINGS}
    assert sizes == {"int8": 8 + 257, "sign": 8 + 33, "topk": 72}


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_memory_of_the_wrong_size_is_refused(encoding: str) -> None:
    number, source = _core.DTYPES[encoding], np.ones(300, np.float32)
    payload = encode(encoding, source)
    with pytest.raises(errors.SizeMismatch):
        _core.encode_slice(number, source, None, payload[:-1], num_kept(300, encoding))
    with pytest.raises(errors.SizeMismatch):
        _core.encode_slice(number, source, np.ones(299, np.float32), payload, num_kept(300, encoding))
    with pytest.raises(errors.SizeMismatch):
        _core.decode_slice(number, payload[:-1], source)


def test_more_than_there_is_cannot_be_kept() -> None:
    with pytest.raises(errors.BadArgument, match="k is 4"):
        _core.encode_slice(_core.DTYPES["topk"], np.ones(3, np.float32), None, bytearray(32), 4)


def test_a_dtype_of_elements_is_no_encoding_but_half_precision_can_be_made_like_one() -> None:
    with pytest.raises(errors.DTypeMismatch, match="int8, sign, topk or half"):
        _core.encoded_bytes(_core.DTYPES["float32"], 3)
    assert _core.encoded_bytes(_core.DTYPES["bfloat16"], 3) == 6
    with pytest.raises(errors.DTypeMismatch, match="int8, sign or topk"):
        _core.decode_slice(_core.DTYPES["bfloat16"], bytes(6), bytearray(12))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@given(seed=seeds)
@few_examples
def test_half_precision_is_rounded_and_what_was_rounded_off_is_kept(
    instruction_set: str, dtype: str, seed: int
) -> None:
    for num_elems in SIZES:
        source, residual = random_floats(num_elems, seed), random_floats(num_elems, seed + 1)
        source[::7] = np.nan
        source[3::7] = np.inf
        before, x = residual.copy(), source + residual
        payload, said = np.empty(2 * num_elems, np.uint8), np.empty(num_elems, np.float32)
        _core.convert(x, _core.DTYPES["float32"], payload, _core.DTYPES[dtype])
        _core.convert(payload, _core.DTYPES[dtype], said, _core.DTYPES["float32"])
        with np.errstate(invalid="ignore"):
            lacking = np.where(np.isfinite(said), x - said, before)
        out = np.zeros(2 * num_elems, np.uint8)
        _core.encode_slice(_core.DTYPES[dtype], source, residual, out, instruction_set=instruction_set)
        assert_same(out, payload)
        assert_same(residual, lacking)
        _core.encode_slice(_core.DTYPES[dtype], x, None, out, instruction_set=instruction_set)
        assert_same(out, payload)


@pytest.mark.parametrize("indices", [(2, 1), (1, 1), (0, 3)])
def test_indices_that_do_not_ascend_or_are_out_of_range_are_refused(indices: tuple[int, int]) -> None:
    payload = np.array([*indices, 0, 0], np.uint32).view(np.uint8)
    out = np.full(3, 7, np.float32)
    with pytest.raises(errors.BadArgument, match="indices"):
        _core.decode_slice(_core.DTYPES["topk"], payload, out)
    assert list(out) == [7, 7, 7]
