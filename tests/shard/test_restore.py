"""Rule state in pulls, and RESTORE: what training may be continued from, in and out again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from psstore import _core, errors
from psstore.types import complete_hyper
from tests.shard.frames import (
    Array,
    Restored,
    decision,
    define,
    floats,
    initialise,
    key_of,
    pull,
    push,
    restore,
    value,
)

A, UNKNOWN = key_of(1), key_of(99)
LARGE = 1 << 14  # float32 elements of 64 KiB: shared with readers, not copied
MOMENTUM = {0: complete_hyper("sgd", {"lr": 1.0, "momentum": 0.5})}
ADAM = {0: complete_hyper("adam", {})}


def make(rule: str = "sgd", num_elems: int = 1, *, zeros: bool = True) -> _core.Shard:
    shard = _core.Shard(index=0)
    define(shard, 1, num_elems, rule=rule, zeros=zeros)
    return shard


def step(shard: _core.Shard, number: int, gradient: Array, hypers: dict[int, dict[str, float]]) -> None:
    push(shard, {A: gradient}, round=number)
    shard.advance(decision(number, [(0, 1, number, 1.0)], hypers=hypers))


def state(shard: _core.Shard, part: int) -> list[float]:
    payload = b"".join(pull(shard, [A], parts=[part]).pieces)
    return [float(element) for element in np.frombuffer(payload, np.float32)]


def statuses(shard: _core.Shard, items: Sequence[Restored], *, sequence: int = 1, dtype: str = "float32") -> list[int]:
    return [answer.status for answer in restore(shard, items, sequence=sequence, dtype=dtype)]


# ---- state in pulls ----


def test_state_comes_as_it_is_stored_with_the_number_of_steps() -> None:
    shard = make()
    for number in (1, 2):
        step(shard, number, floats(4), MOMENTUM)
    pulled = pull(shard, [A, A], parts=[0, 1])
    assert [(answer.status, answer.version) for answer in pulled.answers] == [(errors.OK, 2), (errors.OK, 2)]
    assert np.frombuffer(b"".join(pulled.pieces), np.float32).tolist() == [-10, 6]


def test_state_that_was_never_made_has_no_bytes() -> None:
    shard = make()
    step(shard, 1, floats(4), {0: complete_hyper("sgd", {"lr": 1.0})})
    pulled = pull(shard, [A, A, A], parts=[1, 2, 3])
    assert [(answer.status, answer.version) for answer in pulled.answers] == [(errors.NO_STATE, 1)] * 3
    assert pulled.payload_bytes == 0


def test_state_is_not_converted() -> None:
    shard = make()
    step(shard, 1, floats(4), MOMENTUM)
    assert pull(shard, [A], parts=[1], dtype="bfloat16").answers[0].status == errors.DTypeMismatch.code


def test_state_of_a_slice_that_waits_waits_too() -> None:
    shard = make()
    step(shard, 1, floats(4), MOMENTUM)
    shard.advance(decision(2, [(0, 1, 2, 1.0)], hypers=MOMENTUM, early=True))
    assert pull(shard, [A], parts=[1]).answers[0].status == errors.NOT_APPLIED


@pytest.mark.parametrize("num_elems", [3, LARGE])
def test_state_that_a_reader_holds_keeps_its_bytes(num_elems: int) -> None:
    shard = make(num_elems=num_elems)
    ones = np.ones(num_elems, np.float32)
    step(shard, 1, ones, MOMENTUM)
    (held,) = pull(shard, [A], parts=[1]).pieces
    step(shard, 2, ones, MOMENTUM)
    assert state(shard, 1) == [1.5] * num_elems
    restore(shard, [Restored(A, 1, 7 * ones, steps=2)], sequence=1)
    assert bytes(held) == ones.tobytes()


# ---- RESTORE ----


def test_a_restored_slice_goes_on_like_the_one_it_was_taken_from() -> None:
    original = make("adam", 3)
    gradients = [floats(number, -1, 1e-3) for number in range(1, 7)]
    for number in range(1, 4):
        step(original, number, gradients[number - 1], ADAM)
    steps = pull(original, [A], parts=[1]).answers[0].version
    parts = [np.frombuffer(b"".join(pull(original, [A], parts=[part]).pieces), np.float32) for part in range(3)]
    copy = make("adam", 3)
    restore(copy, [Restored(A, part, data, steps=steps) for part, data in enumerate(parts)], sequence=1)
    for number in range(1, 4):
        step(original, 3 + number, gradients[2 + number], ADAM)
        step(copy, number, gradients[2 + number], ADAM)
    assert copy.state(A) == original.state(A)


def test_a_restored_value_is_newer_than_all_that_was_pulled() -> None:
    shard = make()
    step(shard, 1, floats(1), MOMENTUM)
    (seen,) = pull(shard, [A]).answers
    restore(shard, [Restored(A, 0, floats(7))], sequence=1)
    pulled = pull(shard, [A], versions=[seen.version + 1])
    assert (pulled.answers[0].status, pulled.answers[0].version) == (errors.OK, shard.version + 1)


def test_what_follows_a_restored_value_is_newer_than_it() -> None:
    shard = make()
    restore(shard, [Restored(A, 0, floats(7))], sequence=1)
    for change in (
        lambda: step(shard, 1, floats(1), MOMENTUM),
        lambda: restore(shard, [Restored(A, 0, floats(5))], sequence=2),
        lambda: step(shard, 2, floats(1), MOMENTUM),
    ):
        (seen,) = pull(shard, [A]).answers
        change()
        assert pull(shard, [A], versions=[seen.version + 1]).answers[0].status == errors.OK


def test_versions_are_those_of_decisions_again_once_one_passes_the_slice_by() -> None:
    shard = make()
    restore(shard, [Restored(A, 0, floats(7))], sequence=1)
    step(shard, 1, floats(1), MOMENTUM)
    assert pull(shard, [A]).answers[0].version == 2
    shard.advance(decision(2, [], skip=True))
    step(shard, 3, floats(1), MOMENTUM)
    assert pull(shard, [A]).answers[0].version == 3


def test_a_value_without_state_keeps_the_state() -> None:
    shard = make()
    step(shard, 1, floats(4), MOMENTUM)
    restore(shard, [Restored(A, 0, floats(100))], sequence=1)
    step(shard, 2, floats(0), MOMENTUM)
    assert (value(shard, A), state(shard, 1)) == ([98], [2])


def test_state_without_bytes_is_as_if_it_had_never_been_made() -> None:
    shard = make()
    step(shard, 1, floats(4), MOMENTUM)
    restore(shard, [Restored(A, 1, floats(), steps=0)], sequence=1)
    assert pull(shard, [A], parts=[1]).answers[0].status == errors.NO_STATE
    assert shard.stats()["state_bytes"] == 0
    step(shard, 2, floats(8), MOMENTUM)
    assert (value(shard, A), state(shard, 1)) == ([-12], [8])


def test_state_without_bytes_still_sets_the_steps() -> None:
    shard = make()
    assert restore(shard, [Restored(A, 1, floats(), steps=41)], sequence=1)[0].version == 41
    step(shard, 1, floats(1), MOMENTUM)
    assert pull(shard, [A], parts=[1]).answers[0].version == 42


def test_a_restored_value_is_also_a_first_one() -> None:
    shard = make(zeros=False)
    assert statuses(shard, [Restored(A, 1, floats(1))], sequence=1) == [errors.NotInitialised.code]
    assert statuses(shard, [Restored(A, 0, floats(3)), Restored(A, 1, floats(1))], sequence=2) == [errors.OK] * 2
    initialise(shard, {A: floats(9)})
    assert (value(shard, A), state(shard, 1)) == ([3], [1])


def test_a_value_that_a_reader_holds_keeps_its_bytes() -> None:
    shard = make(num_elems=LARGE)
    (held,) = pull(shard, [A]).pieces
    restore(shard, [Restored(A, 0, np.ones(LARGE, np.float32))], sequence=1)
    assert bytes(held) == bytes(4 * LARGE)
    assert value(shard, A) == [1] * LARGE


def test_what_does_not_fit_is_refused_slice_by_slice() -> None:
    shard = make(num_elems=2)
    define(shard, 2, 2, rule="assign")
    define(shard, 3, 2, rule="add")
    pair = floats(1, 2)
    assert statuses(
        shard,
        [
            Restored(UNKNOWN, 0, pair),
            Restored(key_of(2), 0, pair),
            Restored(key_of(3), 1, pair),
            Restored(A, 2, pair),
            Restored(A, 0, floats()),
            Restored(A, 1, floats(1)),
            Restored(A, 1, pair, steps=2**53 + 1),
            Restored(A, 1, pair, steps=5),
        ],
    ) == [
        errors.UnknownKey.code,
        *[errors.RuleMismatch.code] * 3,
        *[errors.SizeMismatch.code] * 2,
        errors.BadArgument.code,
        errors.OK,
    ]
    assert (value(shard, A), state(shard, 1)) == ([0, 0], [1, 2])


def test_a_value_may_come_in_half_precision_and_state_may_not() -> None:
    shard = make(num_elems=2)
    half = np.array([1, -2], np.float16)
    items = [Restored(A, 0, half), Restored(A, 1, half)]  # type: ignore[arg-type]
    assert statuses(shard, items, dtype="float16") == [errors.OK, errors.DTypeMismatch.code]
    assert value(shard, A) == [1, -2]


def test_it_counts_once_per_client_and_sequence() -> None:
    shard = make()
    restore(shard, [Restored(A, 0, floats(1)), Restored(A, 1, floats(1), steps=9)], sequence=1)
    again = restore(shard, [Restored(A, 0, floats(2)), Restored(A, 1, floats(2), steps=5)], sequence=1)
    assert [(answer.status, answer.version) for answer in again] == [(errors.OK, 1), (errors.OK, 9)]
    assert (value(shard, A), state(shard, 1)) == ([1], [1])
    with pytest.raises(errors.UnexpectedMessage, match="write 2 was expected"):
        restore(shard, [Restored(A, 0, floats(3))], sequence=3)


def test_it_is_no_step_and_leaves_contributions_where_they_are() -> None:
    shard = make()
    push(shard, {A: floats(1)})
    restore(shard, [Restored(A, 0, floats(10))], sequence=1)
    assert shard.version == 0
    shard.advance(decision(1, [(0, 1, 1, 1.0)]))
    assert value(shard, A) == [9]


def test_every_state_that_a_rule_names_can_be_restored() -> None:
    for rule, names in _core.STATES.items():
        shard = make(rule)
        for sequence, name in enumerate(names, start=1):
            item = Restored(A, sequence, floats(sequence), steps=3)
            assert name is not None
            assert statuses(shard, [item], sequence=sequence) == [errors.OK]
            assert shard.state(A)[name] == floats(sequence).tobytes()
