"""How far pushes of an early round get ahead of what comes back, and that nobody waits for ever."""

from __future__ import annotations

import asyncio
import sys
from functools import partial

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import psstore
from psstore.client import window as windows
from psstore.client.pacing import Pace
from psstore.client.store import Store
from psstore.client.window import FEWEST_PUSHES, FIRST_CALM_ROUNDS, FORGETTING, Window
from psstore.types import Tensor, TensorSpec
from tests.support.cluster import at_once

PUSH_BYTES = 4096
NAMES = [f"t{index}" for index in range(4 * FEWEST_PUSHES)]


def tensor(number: int) -> Tensor:
    spec = TensorSpec(name=NAMES[number], shape=(PUSH_BYTES // 4,), rule="sgd")
    return Tensor(id=number, spec=spec, slice_elems=PUSH_BYTES, shards=(0,))


async def a_moment() -> None:
    """All that can go on does."""
    for _ in range(10):
        await asyncio.sleep(0)


class Round:
    """An early round on a pace of its own: which tensors were asked for, which had their turn, which came back."""

    def __init__(self) -> None:
        self.pace = Pace(asyncio.get_running_loop(), 1)
        self.pace.begin(1)
        self.went: list[int] = []
        self.pushes: dict[int, asyncio.Task[None]] = {}
        self.asked: list[int] = []
        self._reads: dict[int, frozenset[int]] = {}

    def read(self, *numbers: int) -> None:
        for number in numbers:
            self._reads[number] = self.pace.begin_read(frozenset([number]), partial(self.asked.append, number))

    async def push(self, *numbers: int) -> None:
        for number in numbers:
            self.pushes[number] = asyncio.create_task(self._push(number))
            await a_moment()

    async def come_back(self, number: int) -> None:
        self.pace.end_read(self._reads[number])
        await a_moment()

    async def _push(self, number: int) -> None:
        await self.pace.turn([tensor(number)])
        self.went.append(number)


def test_push_waits_until_one_before_it_has_come_back() -> None:
    async def work() -> None:
        round_ = Round()
        round_.read(*range(6))
        await round_.push(*range(6))
        assert round_.went == [0, 1, 2, 3]
        await round_.come_back(2)
        assert round_.went == [0, 1, 2, 3, 4]
        await round_.come_back(0)
        assert round_.went == [0, 1, 2, 3, 4, 5]

    asyncio.run(work())


def test_push_that_nobody_reads_holds_up_none() -> None:
    async def work() -> None:
        round_ = Round()
        await round_.push(*range(8))
        assert round_.went == list(range(8))

    asyncio.run(work())


def test_push_that_is_interrupted_lets_the_next_one_go() -> None:
    async def work() -> None:
        round_ = Round()
        round_.read(*range(6))
        await round_.push(*range(6))
        round_.pushes[4].cancel()
        await a_moment()
        await round_.come_back(0)
        assert round_.went == [0, 1, 2, 3, 5]

    asyncio.run(work())


def test_read_of_what_waits_for_its_turn_is_asked_in_front_of_the_push() -> None:
    async def work() -> None:
        round_ = Round()
        round_.read(*range(4))
        await round_.push(*range(5))
        round_.read(3)  # it had its turn
        assert round_.asked == [*range(4), 3]
        round_.read(4)
        await a_moment()
        assert round_.asked == [*range(4), 3]
        asked_before: list[int] = []
        round_.pace.queue([tensor(5)], lambda: asked_before.extend(round_.asked) or True)  # type: ignore[func-returns-value]
        round_.read(5)
        await round_.come_back(0)
        await round_.come_back(1)
        assert asked_before == [*range(4), 3, 4, 5]

    asyncio.run(work())


def test_pushes_that_fail_as_they_go_do_not_hold_up_those_behind_them() -> None:
    """As when the connection is gone for good: more of them than calls may be nested."""

    async def work() -> None:
        round_ = Round()
        round_.read(*range(4))
        await round_.push(*range(4))
        reads: list[frozenset[int]] = []

        def fail() -> bool:
            round_.pace.end_read(reads.pop(0))
            return True

        for _ in range(sys.getrecursionlimit()):
            round_.pace.queue([tensor(5)], fail)
            reads.append(round_.pace.begin_read(frozenset([5]), lambda: None))
        await round_.come_back(0)
        assert not reads

    asyncio.run(work())


def run_round(window: Window, *, trip_s: float, apart_s: float, num_pushes: int = 10) -> None:
    """Pushes that come back at even distances."""
    window.begin()
    window.sent(PUSH_BYTES)
    for index in range(num_pushes):
        window.came_back(PUSH_BYTES, began=index * apart_s, now=index * apart_s + trip_s)


def test_window_is_a_few_pushes_before_anything_is_known() -> None:
    window = Window()
    window.begin()
    window.sent(100)
    window.sent(PUSH_BYTES)
    assert window.num_bytes == FEWEST_PUSHES * PUSH_BYTES


def test_window_grows_in_a_round_to_twice_what_is_on_its_way_in_the_shortest_trip() -> None:
    window = Window()
    run_round(window, trip_s=1.0, apart_s=0.1)
    window.begin()
    window.sent(PUSH_BYTES)
    busy = PUSH_BYTES / 0.1 * 1.0 * FORGETTING
    assert window.num_bytes == pytest.approx(busy)
    for index in range(20):
        window.came_back(PUSH_BYTES, began=0.1 * index, now=2.0 + 0.1 * index)
    assert window.num_bytes == pytest.approx(2 * busy)


def test_window_that_stalls_is_wider_until_there_was_none_for_a_while() -> None:
    window = Window()
    window.begin()
    window.sent(PUSH_BYTES)
    narrow = window.num_bytes
    window.stall()
    for _ in range(2 * FIRST_CALM_ROUNDS):
        window.begin()
        window.sent(PUSH_BYTES)
        assert window.num_bytes == 2 * narrow
    window.begin()
    window.sent(PUSH_BYTES)
    assert window.num_bytes == narrow


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stalls are noticed soon."""
    monkeypatch.setattr(windows, "FIRST_STALL_S", 0.02)
    monkeypatch.setattr(windows, "STALL_S", 0.02)


def train(store: Store, order: list[str]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Two rounds, in which this worker pushes in that order."""
    shape = (PUSH_BYTES // 4,)
    out = np.empty((len(NAMES), *shape), np.float32)
    store._operations.context.pace = Pace(store._backend.thread.loop, store.num_shards)
    store.create_many([TensorSpec(name=name, shape=shape, rule="sgd") for name in NAMES])
    assert store.rank is not None
    gradient = np.full(shape, store.rank + 1.0, np.float32)
    for _ in range(2):
        store.start_commit({"lr": 1.0}, present=NAMES, early=True).result()
        reads = []
        for name in order:
            store.start_push_many({name: gradient})
            reads.append(store.start_pull_many([name], out=[out[NAMES.index(name)]]))
        for read in reads:
            read.result()
        store.finish()
    return out


@pytest.mark.parametrize("orders", [(NAMES, NAMES), (NAMES, NAMES[::-1])], ids=["the same order", "opposite orders"])
def test_paced_rounds_end_in_whatever_order_workers_push(hasty: None, orders: tuple[list[str], list[str]]) -> None:
    server = psstore.LocalStore(shards=2, workers=2)
    with server.connect(rank=0) as first, server.connect(rank=1) as second:
        for out in at_once(lambda: train(first, orders[0]), lambda: train(second, orders[1])):
            assert_array_equal(out, np.full(out.shape, -3.0, np.float32))
