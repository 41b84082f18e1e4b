"""Decisions that wait for a scale: the norms that it is made of, and what happens before and after it is known."""

from __future__ import annotations

import math
from typing import Any

import pytest

from psstore import _core, errors
from tests.shard.frames import Answer, Restored, decision, define, floats, key_of, norms, pull, push, restore, value

A, B, UNKNOWN = key_of(1), key_of(2), key_of(99)
ONE = [(0, 1, 1, 1.0)]


@pytest.fixture
def shard() -> _core.Shard:
    """Tensors 1 and 2, each with a contribution of rank 0 to round 1."""
    shard = _core.Shard(index=0)
    define(shard, 1, 2)
    define(shard, 2, 1)
    push(shard, {A: floats(3, 4), B: floats(2)})
    return shard


def status(shard: _core.Shard, key: int) -> int:
    return pull(shard, [key]).answers[0].status


# ---- norms ----


def test_norms_are_sums_of_squares_of_the_reduced_gradient(shard: _core.Shard) -> None:
    push(shard, {A: floats(1, 2)}, rank=1)
    members = [(0, 1, 1, 1.0), (1, 1, 1, 2.0)]
    shard.advance(decision(1, members, divisor=2.0, present={0: [(1, 2)], 1: [(1, 1)]}, needs_scale=True))
    table, squares = norms(shard, [A, B])
    assert table == [Answer(errors.OK, version=0, num_bytes=8)] * 2
    assert squares == [2.5**2 + 4.0**2, 1.0]


def test_norms_are_the_same_before_and_after_the_step(shard: _core.Shard) -> None:
    shard.advance(decision(1, ONE, needs_scale=True))
    before = norms(shard, [A, B])[1]
    shard.set_scale(1, 0.5)
    assert value(shard, A) == [-1.5, -2]
    assert norms(shard, [A, B])[1] == before == [25, 4]
    push(shard, {A: floats(9, 9)}, round=2)
    assert norms(shard, [A])[1] == [25]


@pytest.mark.parametrize("factor", [0.5, None])
def test_norms_are_known_after_a_scale_that_came_from_elsewhere(shard: _core.Shard, factor: float | None) -> None:
    shard.advance(decision(1, ONE, needs_scale=True))
    shard.set_scale(1, factor)
    assert shard.settle()
    assert norms(shard, [A])[1] == [25]


def test_norms_are_forgotten_with_the_next_decision(shard: _core.Shard) -> None:
    shard.advance(decision(1, ONE, needs_scale=True))
    norms(shard, [A, B])
    shard.set_scale(1, 1.0)
    push(shard, {A: floats(1, 1)}, round=2)
    shard.advance(decision(2, [(0, 1, 2, 1.0)], present={0: [(1, 1)]}, needs_scale=True))
    table, squares = norms(shard, [A, B])
    assert [answer.status for answer in table] == [errors.OK, errors.NOT_MODIFIED]
    assert squares == [2]


def test_a_slice_without_a_gradient_answers_not_modified(shard: _core.Shard) -> None:
    define(shard, 3, 1, rule="assign")
    shard.advance(decision(1, ONE, present={0: [(1, 1), (3, 3)]}, needs_scale=True))
    define(shard, 4, 1)
    table, squares = norms(shard, [UNKNOWN, B, key_of(3), key_of(4), A])
    assert [answer.status for answer in table] == [
        errors.UnknownKey.code,
        *[errors.NOT_MODIFIED] * 3,
        errors.OK,
    ]
    assert [answer.num_bytes for answer in table] == [0, 0, 0, 0, 8]
    assert squares == [25]


@pytest.mark.parametrize(("skip", "needs_scale", "early"), [(False,) * 3, (True, True, False), (False, False, True)])
def test_a_decision_without_scale_has_no_norms(shard: _core.Shard, skip: bool, needs_scale: bool, early: bool) -> None:
    assert norms(shard, [A])[0][0].status == errors.NOT_MODIFIED
    shard.advance(decision(1, ONE, skip=skip, needs_scale=needs_scale, early=early))
    assert norms(shard, [A, B]) == ([Answer(errors.NOT_MODIFIED, version=0, num_bytes=0)] * 2, [])


@pytest.mark.parametrize("element", [math.nan, math.inf])
def test_norms_of_what_is_not_finite_are_not_finite(shard: _core.Shard, element: float) -> None:
    push(shard, {B: floats(element)})
    shard.advance(decision(1, ONE, needs_scale=True))
    assert not math.isfinite(norms(shard, [B])[1][0])


# ---- the scale ----


def test_slices_wait_for_the_scale_and_then_take_the_step(shard: _core.Shard) -> None:
    shard.advance(decision(1, ONE, needs_scale=True))
    assert (shard.version, status(shard, A), status(shard, B)) == (1, errors.NOT_APPLIED, errors.NOT_APPLIED)
    assert shard.settle()
    shard.set_scale(1, 0.5)
    assert not shard.settle(0)
    assert (value(shard, A), value(shard, B)) == ([-1.5, -2], [-1])
    assert (shard.stats()["held_slots"], shard.stats()["staged_bytes"]) == (0, 0)


def test_slices_without_a_gradient_do_not_wait_for_the_scale(shard: _core.Shard) -> None:
    shard.advance(decision(1, ONE, present={0: [(1, 1)]}, needs_scale=True))
    assert (value(shard, B), status(shard, A)) == ([0], errors.NOT_APPLIED)


def test_no_scale_makes_the_decision_a_skip(shard: _core.Shard) -> None:
    shard.advance(decision(1, ONE, needs_scale=True))
    shard.set_scale(1, None)
    assert shard.settle()
    assert (value(shard, A), pull(shard, [A]).answers[0].version) == ([0, 0], 0)
    assert int.from_bytes(shard.state(A)["step"], "little") == 0
    assert (shard.stats()["skipped"], shard.stats()["staged_bytes"]) == (1, 0)


def test_the_first_scale_counts_and_others_are_ignored(shard: _core.Shard) -> None:
    shard.set_scale(1, 0.25)
    shard.advance(decision(1, ONE, needs_scale=True))
    shard.set_scale(2, 0.25)
    shard.set_scale(1, 0.5)
    shard.set_scale(1, 0.25)
    shard.set_scale(1, None)
    assert value(shard, B) == [-1]


def test_a_scale_for_a_decision_that_needs_none_is_ignored(shard: _core.Shard) -> None:
    shard.advance(decision(1, ONE))
    shard.set_scale(1, 0.5)
    shard.set_scale(1, None)
    assert value(shard, B) == [-2]


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_scale_that_is_not_finite_is_refused(shard: _core.Shard, factor: float) -> None:
    shard.advance(decision(1, ONE, needs_scale=True))
    with pytest.raises(errors.BadArgument, match="decision 1 is not finite"):
        shard.set_scale(1, factor)
    assert status(shard, A) == errors.NOT_APPLIED


def test_a_missing_contribution_counts_as_absent_as_ever(shard: _core.Shard) -> None:
    shard.advance(decision(1, [*ONE, (1, 1, 1, 1.0)], needs_scale=True))
    shard.set_scale(1, 0.5)
    assert value(shard, B) == [-1]
    assert shard.missing() == [(1, 1, 1)]


def test_an_early_decision_with_a_scale_is_refused_when_it_is_made() -> None:
    with pytest.raises(errors.BadArgument, match="decision 1 is early and needs a scale"):
        decision(1, ONE, early=True, needs_scale=True)


# ---- while it is awaited ----


def test_the_next_decision_is_refused(shard: _core.Shard) -> None:
    shard.advance(decision(1, ONE, needs_scale=True))
    with pytest.raises(errors.DecisionGap, match="decision 1 still waits for its scale"):
        shard.advance(decision(2, [], skip=True))
    shard.set_scale(1, 1.0)
    shard.advance(decision(2, [], skip=True))
    assert (shard.version, value(shard, B)) == (2, [-2])


def test_a_shard_that_it_does_not_concern_goes_on_without_the_scale(shard: _core.Shard) -> None:
    shard.advance(decision(1, ONE, present={0: [(7, 7)]}, needs_scale=True))
    shard.advance(decision(2, [], skip=True))
    assert shard.version == 2


@pytest.mark.parametrize(
    ("again", "expected"),
    [
        ({"round": 1}, errors.OK),
        ({"round": 2}, errors.RoundOutOfOrder.code),
        ({"round": 1, "incarnation": 2}, errors.RoundOutOfOrder.code),
        ({"round": 1, "rank": 1}, errors.OK),
    ],
)
def test_nothing_replaces_what_it_counts_on(shard: _core.Shard, again: dict[str, Any], expected: int) -> None:
    shard.advance(decision(1, ONE, needs_scale=True))
    assert push(shard, {B: floats(100)}, **again)[0].status == expected
    assert norms(shard, [B])[1] == [4]
    shard.set_scale(1, 0.5)
    assert value(shard, B) == [-1]


def test_a_tensor_can_be_dropped_while_it_waits(shard: _core.Shard) -> None:
    shard.advance(decision(1, ONE, needs_scale=True))
    shard.drop(1)
    assert norms(shard, [A, B])[0][0].status == errors.UnknownKey.code
    shard.set_scale(1, 0.5)
    assert not shard.settle(0)
    assert shard.settle(1)
    assert value(shard, B) == [-1]


def test_a_slice_that_waits_is_not_restored(shard: _core.Shard) -> None:
    shard.advance(decision(1, ONE, needs_scale=True))
    assert restore(shard, [Restored(B, 0, floats(50))], sequence=1)[0].status == errors.NOT_APPLIED
    shard.set_scale(1, 0.5)
    assert value(shard, B) == [-1]
    restore(shard, [Restored(B, 0, floats(50))], sequence=2)
    assert (value(shard, B), norms(shard, [B])[1]) == ([50], [4])
