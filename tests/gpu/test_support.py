"""What the GPU's tests stand on, tried where there is no GPU: on the fake device, and against engines that err."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from bench.rule_case import Case

from psstore import _core
from tests.gpu.copies import check_pieces
from tests.gpu.models import assert_same, train
from tests.gpu.payloads import check_arriving, check_changes, check_converting, check_leaving
from tests.gpu.rounds import after_rounds, assert_same_bits
from tests.gpu.support import (
    CASES,
    ENCODED,
    REFERENCE,
    Engine,
    Place,
    Problem,
    Processor,
    assert_same_answers,
    check_case,
    check_codec,
    check_conversions,
    check_mixed_batch,
    check_squares,
    first_difference,
    fresh_seed,
    problems_of,
)

FAKE = Engine("fake:0")


def test_all_kinds_of_steps_have_an_answer_on_a_device() -> None:
    check_mixed_batch(FAKE, num_problems=30)


@pytest.mark.parametrize("case", [CASES[0], CASES[20]], ids=str)
def test_a_case_has_the_same_answer_on_every_instruction_set(case: Case) -> None:
    check_case(FAKE, case)
    for name in _core.instruction_sets():
        assert_same_answers(problems_of(case, seed=fresh_seed()), Processor(instruction_set=name))


def test_squares_have_the_same_answer_on_a_device() -> None:
    check_squares(FAKE)


def test_conversions_have_the_same_answer_on_a_device() -> None:
    check_conversions(FAKE, 257)


@pytest.mark.parametrize("encoding", ENCODED)
@pytest.mark.parametrize("special", [False, True])
def test_encodings_have_the_same_answer_on_a_device(encoding: str, special: bool) -> None:
    for num_elems in (0, 1, 257):
        for with_residual in (False, True):
            check_codec(FAKE, encoding, num_elems, special=special, with_residual=with_residual)


@pytest.mark.parametrize(("num_pieces", "most_bytes"), [(1, 1000), (300, 40), (3, 200_000)])
def test_pieces_are_checked_on_the_fake_device(num_pieces: int, most_bytes: int) -> None:
    check_pieces(FAKE, num_pieces, most_bytes=most_bytes)


@pytest.mark.parametrize(("num_slices", "most_elems"), [(1, 5000), (40, 700), (5, 70_000)])
def test_payloads_are_checked_on_the_fake_device(num_slices: int, most_elems: int) -> None:
    check_leaving(FAKE, num_slices, most_elems=most_elems)
    check_arriving(FAKE, num_slices, most_elems=most_elems)
    check_converting(FAKE, num_slices, most_elems=most_elems)
    check_changes(FAKE, num_slices, most_elems=most_elems)


def test_problems_cover_what_there_is() -> None:
    problems = [problem for case in CASES for problem in problems_of(case, seed=fresh_seed())]
    assert {one.case.rule for one in problems} == set(_core.RULES)
    assert {0, 1, 2, 3, 4, 8} <= {len(one.inputs) for one in problems}
    assert {one.offset for one in problems} == {0, 1, 4, 16}
    assert {True, False} == {one.in_place for one in problems} == {one.shadow for one in problems}


def test_a_write_beyond_the_end_is_found() -> None:
    place = Place(REFERENCE, 10, offset=1)
    ctypes.memset(place.address, 1, 10)
    assert place.get().tolist() == [1] * 10
    ctypes.memset(place.address + 10, 0, 1)
    with pytest.raises(AssertionError, match="1 bytes outside of 10 were written"):
        place.get()


def test_a_write_before_the_beginning_is_found() -> None:
    place = Place(REFERENCE, 10, offset=4)
    ctypes.memset(place.address - 2, 0, 2)
    with pytest.raises(AssertionError, match="2 bytes outside of 10"):
        place.get()


class Forgetful(Processor):
    """Writes nothing."""

    def update(self, batch: _core.SliceBatch) -> None:
        pass


def test_a_step_that_was_not_taken_is_found() -> None:
    for in_place in (True, False):
        problem = Problem(Case("sgd", {}), "float32", 5, ("float32",), seed=2, in_place=in_place)
        with pytest.raises(AssertionError, match=r"value\[0\] of Problem"):
            assert_same_answers([problem], Forgetful())


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_one_bit_is_a_difference(dtype: str) -> None:
    content = np.arange(64, dtype=np.uint8)
    other = content.copy()
    other[17] ^= 1
    assert first_difference(content, other, dtype) == 17 // (content.size // len(_elements(content, dtype)))
    assert first_difference(content, content.copy(), dtype) is None


def _elements(content: np.ndarray[tuple[int], np.dtype[np.uint8]], dtype: str) -> list[int]:
    width = {"float32": 4, "float64": 8}.get(dtype, 2)
    return content.view(f"u{width}").tolist()


def test_the_bits_of_a_nan_are_no_difference_but_that_it_is_one_is() -> None:
    nans = [np.array([bits], np.uint32).view(np.uint8) for bits in (0x7FC00000, 0xFFC00001)]
    assert first_difference(nans[0], nans[1], "float32") is None
    assert first_difference(nans[0], np.zeros(4, np.uint8), "float32") == 0


@pytest.mark.parametrize("compression", [None, "bf16", "int8", "push=topk:0.05,pull=bf16"])
def test_models_that_are_compared_train_alike_where_no_gpu_is(compression: str | None) -> None:
    one, other = (
        train("backward", through_main_memory=through, compression=compression, device="cpu")
        for through in (False, True)
    )
    assert_same(one, other)


@pytest.mark.parametrize("max_norm", [None, 1.0], ids=["plain", "clipped"])
def test_rounds_end_with_the_same_bits_on_a_device(max_norm: float | None) -> None:
    assert_same_bits(
        after_rounds("fake:0", rounds=2, max_norm=max_norm), after_rounds("cpu", max_norm=max_norm, rounds=2)
    )
