"""What is started while an answer is near waits, to go out in one write with what comes after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from psstore import _core
from tests.client.direct_support import Starter, reply

HEAD_BYTES = _core.HEADER_BYTES + _core.SLICE_ENTRY_BYTES + _core.FIELDS_CRC_BYTES
HELD_BYTES = 64 << 10
"""The largest that waits: call_driver.cc's kMaxCorkedBytes."""

SMALL_BYTES = HEAD_BYTES + 8 * 4


@pytest.fixture
def starter() -> Iterator[Starter]:
    made = Starter()
    yield made
    made.close()


def test_what_is_started_behind_a_write_waits_until_it_is_sent_together(starter: Starter) -> None:
    assert starter.start()
    assert starter.came() == SMALL_BYTES
    for _ in range(3):
        assert starter.start()
    assert starter.came() == 0
    assert starter.corked == [starter.session]
    starter.driver.uncork()
    assert starter.came() == 3 * SMALL_BYTES
    assert not starter.corked
    assert starter.session.numbers() == [1, 2, 3, 4]


def test_nothing_waits_where_no_answer_is_near(starter: Starter) -> None:
    starter.start()
    starter.say(reply("ASSIGNED"))
    starter.start()
    assert starter.came() == 2 * SMALL_BYTES


def test_nothing_waits_for_the_answer_to_a_read(starter: Starter) -> None:
    starter.start("PULL")
    starter.start()
    assert starter.came() == HEAD_BYTES + SMALL_BYTES


def test_what_was_held_is_a_write_whose_answer_is_near_once_it_is_sent(starter: Starter) -> None:
    starter.start()
    starter.start()
    starter.driver.uncork()
    starter.say(reply("ASSIGNED"))
    starter.came()
    starter.start()
    assert starter.came() == 0


@pytest.mark.parametrize(
    "more",
    [
        lambda starter: starter.start(num_elems=HELD_BYTES // 4),
        lambda starter: [starter.start(num_elems=1 << 12) for _ in range(5)],
    ],
    ids=["a large one", "many"],
)
def test_much_does_not_wait_and_what_waits_goes_before_it(starter: Starter, more: Callable[[Starter], object]) -> None:
    starter.start()
    starter.start()
    more(starter)
    assert starter.came() >= HELD_BYTES
    assert not starter.corked


def test_what_waits_for_a_connection_that_is_lost_is_sent_on_the_next(starter: Starter) -> None:
    starter.start()
    starter.start()
    starter.session.disconnected()
    starter.driver.uncork()
    assert starter.came() == SMALL_BYTES
    starter.reconnect()
    starter.session.send()
    assert starter.came() == 2 * SMALL_BYTES
    assert starter.session.numbers() == [1, 2]


def test_what_the_kernel_does_not_take_of_it_is_left_to_the_loop(starter: Starter) -> None:
    starter.start()
    starter.start()
    filled = starter.fill()
    starter.driver.uncork()
    assert not starter.awaits_room()
    assert starter.came() == SMALL_BYTES + filled
    assert starter.awaits_room()
    assert starter.session.send()
    assert starter.came() == SMALL_BYTES


def test_what_waits_goes_behind_what_the_kernel_did_not_take_before(starter: Starter) -> None:
    starter.start()
    starter.start()
    starter.fill()
    starter.driver.uncork()
    assert starter.start()
    starter.driver.uncork()
    starter.came()
    assert starter.session.send()
    assert starter.came() == 2 * SMALL_BYTES
    assert starter.session.numbers() == [1, 2, 3]
