"""What the ledger notices, on notes and decisions by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.learners.ledger import UNIT, Account, Contribution, Decision, Notes, account, read

STEPS = 2 * UNIT


def of_one_decision(added: Sequence[float], *sent: Sequence[Contribution]) -> Account:
    return account(dict(enumerate(sent)), [Decision(7, np.array(added))])


def counted(amount: float = STEPS) -> list[Contribution]:
    return [Contribution(7, amount, decision=7, counts=True)]


def late(amount: float = STEPS) -> list[Contribution]:
    return [Contribution(7, amount, decision=7, counts=False)]


def unanswered(amount: float = STEPS) -> list[Contribution]:
    return [Contribution(7, amount)]


def test_a_mean_of_those_who_count_is_right() -> None:
    found = of_one_decision([STEPS / 3, UNIT / 3, STEPS / 3, 0], counted(), counted(UNIT), unanswered(), late())
    assert not found.lost
    assert not found.doubled
    assert (found.acknowledged, found.late, found.unanswered, found.unanswered_and_counted) == (2, 1, 1, 1)


def test_a_life_that_was_killed_may_have_sent_before_the_next_one() -> None:
    found = of_one_decision([UNIT / 2, STEPS / 2], unanswered() + counted(UNIT), counted())
    assert not found.lost
    assert not found.doubled


def test_what_was_acknowledged_and_is_not_there_is_lost() -> None:
    assert of_one_decision([STEPS, 0], counted(), counted()).lost


def test_what_was_late_and_counts_is_doubled() -> None:
    assert of_one_decision([STEPS / 2, STEPS / 2], counted(), late()).doubled


def test_what_counts_twice_is_doubled() -> None:
    assert of_one_decision([2 * STEPS / 2, STEPS / 2], counted(), counted()).doubled


def test_what_nobody_has_sent_is_doubled() -> None:
    assert of_one_decision([STEPS / 2, STEPS / 2], counted(), []).doubled


def test_notes_are_read_over_lives(tmp_path: Path) -> None:
    notes = Notes(tmp_path, 0)
    notes.commits(1, STEPS)
    notes.decided(1, 1, True)
    notes.commits(2, STEPS)
    notes.commits(3, UNIT)
    notes.decided(3, 3, False)
    notes.commits(4, UNIT)
    assert read(tmp_path, 1)[0] == [
        Contribution(1, STEPS, decision=1, counts=True),
        Contribution(2, STEPS),
        Contribution(3, UNIT, decision=3, counts=False),
        Contribution(4, UNIT),
    ]
