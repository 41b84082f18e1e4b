"""Decisions through Python: their order, their checks, and that a refused one changes nothing."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest

from psstore import _core, errors
from tests.shard.frames import decision, define, floats, key_of, push, value

A, B = key_of(1), key_of(2)


@pytest.fixture
def shard() -> _core.Shard:
    shard = _core.Shard(index=0)
    define(shard, 1, 1)
    define(shard, 2, 1)
    return shard


def test_a_gap_is_refused(shard: _core.Shard) -> None:
    with pytest.raises(errors.DecisionGap, match="decision 2 came, but this shard is at 0"):
        shard.advance(decision(2, []))


def test_a_missing_contribution_is_noted_and_counts_as_absent(shard: _core.Shard) -> None:
    push(shard, {A: floats(1)})
    assert shard.missing() == []
    shard.advance(decision(1, [(0, 1, 1, 1.0)]))
    assert (shard.version, value(shard, A), value(shard, B)) == (1, [-1], [0])
    assert (shard.missing(), shard.stats()["missing"]) == ([(0, 1, 1)], 1)
    push(shard, {B: floats(1)})  # too late: the step without it is taken
    assert value(shard, B) == [0]


def test_what_a_life_of_a_rank_left_missing_is_forgotten_with_it(shard: _core.Shard) -> None:
    shard.advance(decision(1, [(0, 1, 1, 1.0)]))
    push(shard, {A: floats(1), B: floats(1)}, incarnation=2, round=2)
    shard.advance(decision(2, [(0, 2, 2, 1.0)]))
    assert shard.missing() == []
    assert value(shard, A) == [-1]


def test_a_tensor_that_came_while_the_decision_was_on_its_way_is_left_alone(shard: _core.Shard) -> None:
    push(shard, {A: floats(1), B: floats(1)})
    define(shard, 3, 1)
    shard.advance(decision(1, [(0, 1, 1, 1.0)], present={0: [(1, 2)]}))
    assert (value(shard, A), value(shard, key_of(3))) == ([-1], [0])


def test_missing_hyper_parameters_are_named_and_nothing_changes(shard: _core.Shard) -> None:
    push(shard, {A: floats(1), B: floats(1)})
    with pytest.raises(errors.BadHyper, match="group 0"):
        shard.advance(decision(1, [(0, 1, 1, 1.0)], hypers={}))
    with pytest.raises(errors.BadHyper, match="momentum"):
        shard.advance(decision(1, [(0, 1, 1, 1.0)], hypers={0: {"lr": 1.0}}))
    assert shard.version == 0


def test_a_skip_takes_no_step_and_needs_no_contribution(shard: _core.Shard) -> None:
    push(shard, {A: floats(1)})
    shard.advance(decision(1, [(0, 1, 1, 1.0)], skip=True))
    assert shard.settle()
    assert value(shard, A) == [0]
    assert shard.stats()["staged_bytes"] == 0
    assert int.from_bytes(shard.state(A)["step"], "little") == 0


def test_settling_goes_on_where_it_stopped(shard: _core.Shard) -> None:
    push(shard, {A: floats(1), B: floats(1)})
    shard.advance(decision(1, [(0, 1, 1, 1.0)]))
    assert [shard.settle(max_slots=1), shard.settle(max_slots=1)] == [False, True]


@pytest.mark.parametrize(
    ("number", "divisor", "members", "present"),
    [
        (0, 1.0, [], {}),
        (1, 0.0, [], {}),
        (1, math.nan, [], {}),
        (1, 1.0, [(1, 1, 1, 1.0), (0, 1, 1, 1.0)], {}),
        (1, 1.0, [(0, 1, 1, math.inf)], {}),
        (1, 1.0, [(0, 1, 1, 1e300)], {}),
        (1, 1.0, [(0, 1, 1, 1.0)], {1: [(1, 1)]}),
        (1, 1.0, [(0, 1, 1, 1.0)], {0: [(2, 1)]}),
    ],
)
def test_a_decision_that_makes_no_sense_is_refused_when_it_is_made(
    number: int, divisor: float, members: list[tuple[int, int, int, float]], present: dict[int, list[tuple[int, int]]]
) -> None:
    with pytest.raises(errors.BadArgument):
        decision(number, members, divisor=divisor, present=present)


def test_applying_lets_other_python_threads_run() -> None:
    """Looked for until it is seen: on a busy machine the other thread may miss a few chances."""
    num_elems = 1 << 22
    shard = _core.Shard(index=0)
    define(shard, 1, num_elems)
    ticks = 0
    stop = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.is_set():
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        for round_ in range(1, 200):
            push(shard, {A: np.ones(num_elems, np.float32)}, round=round_)
            shard.advance(decision(round_, [(0, 1, round_, 1.0)]))
            before = ticks
            shard.settle()
            if ticks - before > 1000:
                return
        pytest.fail("no other thread ran while the shard was at work")
    finally:
        stop.set()
        thread.join()
