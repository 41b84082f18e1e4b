"""What is started while an answer is near waits, to go out in one write with what comes after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from psstore import _core
from tests.client.lane_support import Lane

HEAD_BYTES = _core.HEADER_BYTES + _core.SLICE_ENTRY_BYTES + _core.FIELDS_CRC_BYTES
HELD_BYTES = 64 << 10
"""attempt.h's kMaxHeldBytes."""


@pytest.fixture
def lane() -> Iterator[Lane]:
    made = Lane()
    yield made
    made.close()


SMALL_BYTES = HEAD_BYTES + 8 * 4


def test_what_is_started_behind_a_write_waits_until_it_is_sent_together(lane: Lane) -> None:
    assert lane.start()
    assert lane.came() == SMALL_BYTES
    for _ in range(3):
        assert lane.start()
    assert lane.came() == 0
    assert lane.holding == [lane.line]
    lane.lane.send_held()
    assert lane.came() == 3 * SMALL_BYTES
    assert not lane.holding
    assert lane.left() == [1, 2, 3, 4]


def test_nothing_waits_where_no_answer_is_near(lane: Lane) -> None:
    lane.start()
    lane.answer(1)
    lane.start()
    assert lane.came() == 2 * SMALL_BYTES


def test_nothing_waits_for_the_answer_to_a_read(lane: Lane) -> None:
    lane.start("PULL")
    lane.start()
    assert lane.came() == HEAD_BYTES + SMALL_BYTES


def test_what_was_held_is_a_write_whose_answer_is_near_once_it_is_sent(lane: Lane) -> None:
    lane.start()
    lane.start()
    lane.lane.send_held()
    lane.answer(1)
    lane.came()
    lane.start()
    assert lane.came() == 0


@pytest.mark.parametrize(
    "more",
    [
        lambda lane: lane.start(num_elems=HELD_BYTES // 4),
        lambda lane: [lane.start(num_elems=1 << 12) for _ in range(5)],
    ],
    ids=["a large one", "many"],
)
def test_much_does_not_wait_and_what_waits_goes_before_it(lane: Lane, more: Callable[[Lane], object]) -> None:
    lane.start()
    lane.start()
    more(lane)
    assert lane.came() >= HELD_BYTES
    assert not lane.holding


def test_what_waits_for_a_connection_that_is_lost_is_left_to_be_sent_on_the_next(lane: Lane) -> None:
    lane.start()
    lane.start()
    lane.line.disconnect()
    lane.lane.send_held()
    assert lane.came() == SMALL_BYTES
    assert lane.left() == [1, 2]


def test_what_the_kernel_does_not_take_of_it_is_left_to_the_loop(lane: Lane) -> None:
    lane.start()
    lane.start()
    filled = lane.fill()
    lane.lane.send_held()
    assert not lane.awaits_room()
    assert lane.came() == SMALL_BYTES + filled
    assert sum(map(len, lane.unsent)) == SMALL_BYTES
    assert lane.awaits_room()


def test_what_waits_goes_behind_what_the_kernel_did_not_take_before(lane: Lane) -> None:
    lane.start()
    lane.start()
    lane.fill()
    lane.lane.send_held()
    assert lane.start()
    lane.lane.send_held()
    lane.came()
    assert sum(map(len, lane.unsent)) == 2 * SMALL_BYTES
    assert lane.left() == [1, 2, 3]
