"""Whose turn it is: evenly spread for who is there in each round, and even for who comes only now and then."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from psstore.torch.turns import fragment_of, fragments_since


def test_orders_are_what_all_learners_have_agreed_on() -> None:
    cycles = [[fragment_of(4 * cycle + place, 4) for place in range(1, 5)] for cycle in range(10)]
    assert cycles == [
        [0, 1, 2, 3],
        [0, 1, 2, 3],
        [1, 0, 3, 2],
        [1, 3, 0, 2],
        [1, 3, 0, 2],
        [3, 1, 2, 0],
        [3, 2, 1, 0],
        [3, 2, 1, 0],
        [2, 3, 0, 1],
        [2, 0, 3, 1],
    ]


@pytest.mark.parametrize("num_fragments", range(1, 9))
def test_each_fragment_has_a_turn_in_each_cycle_and_nearly_a_cycle_after_its_last_one(num_fragments: int) -> None:
    turns = [fragment_of(round, num_fragments) for round in range(1, 100 * num_fragments + 1)]
    for begin in range(0, len(turns), num_fragments):
        assert sorted(turns[begin : begin + num_fragments]) == list(range(num_fragments))
    for fragment in range(num_fragments):
        rounds = [round for round, whose in enumerate(turns) if whose == fragment]
        gaps = {later - earlier for earlier, later in pairwise(rounds)}
        assert gaps <= {num_fragments - 1, num_fragments, num_fragments + 1}


@pytest.mark.parametrize("num_fragments", range(2, 9))
def test_a_learner_that_is_whole_rounds_behind_comes_for_all_fragments_alike(num_fragments: int) -> None:
    each = 64
    for slowness in range(2, 9):
        for first in range(1, num_fragments + 1):
            rounds = range(first, first + each * num_fragments * slowness, slowness)
            came = Counter(fragment_of(round, num_fragments) for round in rounds)
            assert len(came) == num_fragments, f"{slowness} times slower, from round {first}: {came}"
            assert each / 2 < min(came.values()) <= max(came.values()) < each * 3 / 2


@pytest.mark.parametrize("num_fragments", range(1, 9))
def test_whoever_has_missed_rounds_is_told_every_fragment_that_they_were_about(num_fragments: int) -> None:
    for last in range(1, 8 * num_fragments):
        for merged in range(last):
            missed = {fragment_of(round, num_fragments) for round in range(merged + 1, last + 1)}
            assert fragments_since(merged, last, num_fragments) == sorted(missed)
