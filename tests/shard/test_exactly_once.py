"""Whatever is sent again counts once: before and after its decision, from this life or an earlier one."""

from __future__ import annotations

import numpy as np
import pytest

from psstore import _core, errors
from tests.shard.frames import decision, define, floats, initialise, key_of, pull, push, value, write

A, B, UNKNOWN = key_of(1), key_of(2), key_of(99)


@pytest.fixture
def shard() -> _core.Shard:
    shard = _core.Shard(index=0)
    define(shard, 1, 1)
    define(shard, 2, 2, rule="assign")
    return shard


def test_a_push_before_its_decision_replaces_the_first(shard: _core.Shard) -> None:
    push(shard, {A: floats(1)})
    push(shard, {A: floats(2)})
    shard.advance(decision(1, [(0, 1, 1, 1.0)]))
    assert value(shard, A) == [-2]


def test_a_push_after_its_decision_is_acknowledged_and_ignored(shard: _core.Shard) -> None:
    push(shard, {A: floats(1)})
    shard.advance(decision(1, [(0, 1, 1, 1.0)]))
    assert value(shard, A) == [-1]
    (answer,) = push(shard, {A: floats(100)})
    assert (answer.status, answer.version) == (errors.OK, 1)
    assert shard.stats()["staged_bytes"] == 0


def test_a_decision_counts_once(shard: _core.Shard) -> None:
    push(shard, {A: floats(1)})
    for _ in range(2):
        shard.advance(decision(1, [(0, 1, 1, 1.0)]))
    assert value(shard, A) == [-1]


def test_an_earlier_life_is_refused(shard: _core.Shard) -> None:
    push(shard, {A: floats(1)}, incarnation=2)
    assert push(shard, {A: floats(5)}, incarnation=1)[0].status == errors.StaleIncarnation.code
    shard.advance(decision(1, [(0, 2, 1, 1.0)]))
    assert value(shard, A) == [-1]


def test_a_write_counts_once_per_client_and_sequence(shard: _core.Shard) -> None:
    write(shard, "ASSIGN", {B: floats(1, 2)}, sequence=1, client="a")
    for _ in range(3):
        assert write(shard, "ADD", {B: floats(1, 1)}, sequence=2, client="a")[0].version == 2
    write(shard, "ADD", {B: floats(10, 10)}, sequence=1, client="b")
    assert value(shard, B) == [12, 13]
    assert (shard.last_sequence("a"), shard.last_sequence("b"), shard.last_sequence("c")) == (2, 1, 0)


def test_a_write_refused_whole_still_uses_up_its_sequence(shard: _core.Shard) -> None:
    (answer,) = write(shard, "ASSIGN", {UNKNOWN: floats(1)}, sequence=1)
    assert answer.status == errors.UnknownKey.code
    assert write(shard, "ADD", {B: floats(1, 1)}, sequence=2)[0].status == errors.OK


@pytest.mark.parametrize("op", ["ADD", "ASSIGN"])
def test_a_write_that_was_refused_is_refused_when_it_comes_again(op: str) -> None:
    shard = _core.Shard(index=0, refuse_non_finite=True)
    define(shard, 1, 1, rule="add" if op == "ADD" else "assign")
    define(shard, 2, 2, rule="assign")
    values = {A: floats(np.nan), B: floats(1, 2)}
    refused = [errors.NonFinite.code, errors.OK]
    for _ in range(2):
        assert [answer.status for answer in write(shard, op, values, sequence=1)] == refused
    write(shard, op, {B: floats(1, 1)}, sequence=2)
    assert [answer.status for answer in write(shard, op, values, sequence=1)] == refused
    assert value(shard, A) == [0]


def test_a_write_that_lacks_those_before_it_is_refused(shard: _core.Shard) -> None:
    with pytest.raises(errors.UnexpectedMessage, match="write 1 was expected"):
        write(shard, "ASSIGN", {B: floats(1, 2)}, sequence=2)
    assert value(shard, B) == [0, 0]


def test_first_values_are_set_once() -> None:
    shard = _core.Shard(index=0)
    define(shard, 1, 1, zeros=False)
    assert pull(shard, [A]).answers[0].status == errors.NotInitialised.code
    initialise(shard, {A: floats(3)})
    initialise(shard, {A: floats(4)})
    assert value(shard, A) == [3]
