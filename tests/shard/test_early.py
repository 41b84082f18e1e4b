"""Early decisions through Python: made before their contributions, carried out slice by slice as those come."""

from __future__ import annotations

import pytest

from psstore import _core, errors
from tests.shard.frames import Answer, decision, define, floats, initialise, key_of, pull, push, value, write

A, B = key_of(1), key_of(2)
BOTH = [(0, 1, 1, 1.0), (1, 1, 1, 1.0)]
"""Ranks 0 and 1 in round 1."""


@pytest.fixture
def shard() -> _core.Shard:
    shard = _core.Shard(index=0)
    define(shard, 1, 1)
    define(shard, 2, 1)
    return shard


def status(shard: _core.Shard, key: int, version: int = 0) -> int:
    return pull(shard, [key], versions=[version]).answers[0].status


# ---- the step ----


def test_a_slice_takes_the_step_when_its_last_contribution_arrives(shard: _core.Shard) -> None:
    push(shard, {A: floats(1), B: floats(1)}, rank=0)
    shard.advance(decision(1, BOTH, early=True))
    assert (status(shard, A), status(shard, B)) == (errors.NOT_APPLIED, errors.NOT_APPLIED)
    assert push(shard, {A: floats(2)}, rank=1) == [Answer(errors.OK, version=1, num_bytes=0)]
    assert shard.stats()["applied_in_place"] == 1
    assert (value(shard, A), status(shard, B)) == ([-3], errors.NOT_APPLIED)
    push(shard, {B: floats(4)}, rank=1)
    assert value(shard, B) == [-5]
    assert shard.stats()["staged_bytes"] == 0


def test_slices_that_are_complete_when_it_comes_take_the_step_as_ever(shard: _core.Shard) -> None:
    for rank in (0, 1):
        push(shard, {A: floats(1)}, rank=rank)
    shard.advance(decision(1, BOTH, early=True))
    assert shard.stats()["applied_in_place"] == 0
    assert shard.settle()
    assert value(shard, A) == [-2]


def test_slices_that_nobody_promised_are_left_alone_and_wait_for_nothing(shard: _core.Shard) -> None:
    shard.advance(decision(1, BOTH, present={0: [(1, 1)], 1: [(1, 1)]}, early=True))
    assert (value(shard, B), status(shard, A)) == ([0], errors.NOT_APPLIED)


def test_what_a_member_did_not_promise_is_not_waited_for_and_does_not_count(shard: _core.Shard) -> None:
    shard.advance(decision(1, BOTH, present={0: [(1, 2)], 1: [(2, 2)]}, early=True))
    push(shard, {A: floats(1)}, rank=0)
    push(shard, {A: floats(100)}, rank=1)
    assert value(shard, A) == [-1]
    assert shard.stats()["staged_bytes"] == 0


def test_a_promise_without_effect_is_a_skip(shard: _core.Shard) -> None:
    push(shard, {A: floats(1)}, rank=0)
    shard.advance(decision(1, BOTH, early=True, skip=True))
    assert shard.settle()
    push(shard, {A: floats(1)}, rank=1)
    assert value(shard, A) == [0]
    assert shard.stats()["staged_bytes"] == 0


def test_a_slice_of_no_elements_waits_like_any_other() -> None:
    shard = _core.Shard(index=0)
    define(shard, 1, 0)
    shard.advance(decision(1, [(0, 1, 1, 1.0)], early=True))
    assert status(shard, A) == errors.NOT_APPLIED
    assert push(shard, {A: floats()})[0].version == 1
    assert status(shard, A) == errors.OK


def test_hyper_parameters_of_promised_tensors_are_checked_before_anything_changes(shard: _core.Shard) -> None:
    with pytest.raises(errors.BadHyper, match="group 0"):
        shard.advance(decision(1, BOTH, hypers={}, early=True))
    assert shard.version == 0
    shard.advance(decision(1, BOTH, hypers={}, present={0: [], 1: []}, early=True))
    assert shard.version == 1


# ---- exactly once ----


def test_a_contribution_sent_again_while_others_are_awaited_counts_once(shard: _core.Shard) -> None:
    shard.advance(decision(1, BOTH, early=True))
    push(shard, {A: floats(1)}, rank=0)
    assert push(shard, {A: floats(100)}, rank=0)[0].status == errors.OK
    push(shard, {A: floats(2)}, rank=1)
    assert value(shard, A) == [-3]


def test_a_contribution_sent_again_after_the_step_is_ignored_and_does_not_stay(shard: _core.Shard) -> None:
    shard.advance(decision(1, BOTH, early=True))
    for rank in (0, 1):
        push(shard, {A: floats(1)}, rank=rank)
    duplicates = shard.stats()["duplicates"]
    for rank in (0, 1):
        assert push(shard, {A: floats(100)}, rank=rank) == [Answer(errors.OK, version=1, num_bytes=0)]
    assert value(shard, A) == [-2]
    assert (shard.stats()["staged_bytes"], shard.stats()["duplicates"]) == (0, duplicates + 2)


def test_rounds_before_the_early_one_are_ignored(shard: _core.Shard) -> None:
    shard.advance(decision(1, [(0, 1, 7, 1.0)], early=True))
    assert push(shard, {A: floats(100)}, round=6)[0].status == errors.OK
    assert shard.stats()["staged_bytes"] == 0
    push(shard, {A: floats(1)}, round=7)
    assert value(shard, A) == [-1]


def test_a_later_round_never_replaces_what_a_held_slice_counts_on(shard: _core.Shard) -> None:
    shard.advance(decision(1, BOTH, early=True))
    assert push(shard, {A: floats(100)}, rank=0, round=2)[0].status == errors.RoundOutOfOrder.code
    push(shard, {A: floats(1)}, rank=0)
    assert push(shard, {A: floats(100)}, rank=0, round=2)[0].status == errors.RoundOutOfOrder.code
    push(shard, {A: floats(2)}, rank=1)
    assert push(shard, {A: floats(10)}, rank=0, round=2)[0].status == errors.OK
    assert value(shard, A) == [-3]


def test_a_later_life_never_replaces_it_either_and_ends_the_earlier_one(shard: _core.Shard) -> None:
    shard.advance(decision(1, BOTH, early=True))
    push(shard, {A: floats(1)}, rank=0)
    assert push(shard, {A: floats(100)}, rank=0, incarnation=2)[0].status == errors.RoundOutOfOrder.code
    push(shard, {A: floats(2)}, rank=1)
    assert value(shard, A) == [-3]
    assert push(shard, {B: floats(1)}, rank=0)[0].status == errors.StaleIncarnation.code


def test_the_round_after_is_decided_as_ever(shard: _core.Shard) -> None:
    shard.advance(decision(1, BOTH, early=True))
    for round_ in (1, 2):
        for rank in (0, 1):
            push(shard, {A: floats(1), B: floats(2)}, rank=rank, round=round_)
    shard.advance(decision(2, [(0, 1, 2, 1.0), (1, 1, 2, 1.0)]))
    assert push(shard, {A: floats(100)}, rank=0, round=2)[0].status == errors.OK
    assert (value(shard, A), value(shard, B)) == ([-4], [-8])
    assert shard.stats()["staged_bytes"] == 0


# ---- while slices wait ----


def test_the_next_decision_ends_the_wait_and_notes_who_was_awaited(shard: _core.Shard) -> None:
    """There is none before all have said that what they promised is here."""
    shard.advance(decision(1, BOTH, early=True))
    push(shard, {A: floats(1), B: floats(1)}, rank=0)
    push(shard, {A: floats(1)}, rank=1)
    assert (shard.missing(), status(shard, B)) == ([], errors.NOT_APPLIED)
    shard.advance(decision(2, [], skip=True))
    assert (shard.version, value(shard, A), value(shard, B)) == (2, [-2], [-1])
    assert (shard.missing(), shard.stats()["held_slots"]) == ([(1, 1, 1)], 0)
    push(shard, {B: floats(1)}, rank=1)
    assert value(shard, B) == [-1]


def test_settling_has_nothing_to_do_for_slices_that_wait(shard: _core.Shard) -> None:
    for rank in (0, 1):
        push(shard, {A: floats(1)}, rank=rank)
    shard.advance(decision(1, BOTH, early=True))
    assert [shard.settle(0), shard.settle(1), shard.settle(0)] == [False, True, True]
    assert shard.stats()["held_slots"] == 1


def test_a_new_pull_and_one_for_news_are_both_told_to_wait(shard: _core.Shard) -> None:
    shard.advance(decision(1, BOTH, early=True))
    assert pull(shard, [A, A], versions=[0, 1]).answers == [Answer(errors.NOT_APPLIED, version=0, num_bytes=0)] * 2


def test_plain_tensors_have_no_part_in_it(shard: _core.Shard) -> None:
    define(shard, 3, 1, rule="assign")
    shard.advance(decision(1, BOTH, early=True))
    write(shard, "ADD", {key_of(3): floats(5)}, sequence=1)
    assert value(shard, key_of(3)) == [5]


def test_a_first_value_may_still_come(shard: _core.Shard) -> None:
    define(shard, 3, 1, zeros=False)
    key = key_of(3)
    shard.advance(decision(1, [(0, 1, 1, 1.0)], present={0: [(3, 3)]}, early=True))
    assert push(shard, {key: floats(1)})[0].status == errors.NotInitialised.code
    assert status(shard, key) == errors.NotInitialised.code, "for which the push may wait that the slice is held for"
    initialise(shard, {key: floats(10)})
    assert status(shard, key) == errors.NOT_APPLIED
    push(shard, {key: floats(1)})
    assert value(shard, key) == [9]


def test_a_tensor_can_be_dropped_while_it_waits(shard: _core.Shard) -> None:
    shard.advance(decision(1, BOTH, early=True))
    for rank in (0, 1):
        push(shard, {A: floats(1)}, rank=rank)
    shard.drop(2)
    assert shard.stats()["held_slots"] == 0
    assert shard.settle(0)
    shard.advance(decision(2, [], skip=True))
    assert value(shard, A) == [-2]


def test_a_tensor_defined_while_others_wait_has_no_part_in_it(shard: _core.Shard) -> None:
    shard.advance(decision(1, BOTH, early=True))
    define(shard, 3, 1)
    assert value(shard, key_of(3)) == [0]
    assert push(shard, {key_of(3): floats(1)}, rank=0)[0].status == errors.OK
    assert shard.stats()["staged_bytes"] == 0


def test_state_shows_a_waiting_slice_before_the_step(shard: _core.Shard) -> None:
    shard.advance(decision(1, BOTH, early=True))
    assert int.from_bytes(shard.state(A)["step"], "little") == 0
