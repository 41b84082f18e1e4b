"""Flow control of early rounds: how far pushes get ahead of what comes back, in which order frames go, and that no
call waits for ever."""

from __future__ import annotations

import asyncio
import sys
from functools import partial

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import psstore
from psstore import _core
from psstore.client import flow_control
from psstore.client.flow_control import FEWEST_PUSHES, FIRST_CALM_ROUNDS, FORGETTING, FramesInFlight, Pace, Window
from psstore.client.store import Store
from psstore.errors import BadArgument
from psstore.protocol.client import Transfer
from psstore.protocol.requests import Future
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
    monkeypatch.setattr(flow_control, "FIRST_STALL_S", 0.02)
    monkeypatch.setattr(flow_control, "STALL_S", 0.02)


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


# ---- frames in flight -------------------------------------------------------------------------------

FRAME_BYTES = 4096


def frame(number: int, *, shard: int = 0, num_bytes: int = FRAME_BYTES) -> Transfer:
    return Transfer(shard, _core.SliceTable([(number, num_bytes, _core.DTYPES["float32"])]), None)


class Wire:
    """What was sent, and who acknowledges it."""

    def __init__(self) -> None:
        self.sent: list[Transfer] = []
        self._answers: list[Future] = []

    def send(self, transfer: Transfer, future: Future) -> None:
        self.sent.append(transfer)
        self._answers.append(future)

    async def acknowledge(self, position: int) -> None:
        self._answers[position].set_result(None)
        await a_moment()

    async def refuse(self, position: int) -> None:
        self._answers[position].set_exception(BadArgument("no"))
        await a_moment()


def test_a_frame_waits_until_one_before_it_is_acknowledged_whatever_its_shard() -> None:
    async def work() -> None:
        frames_in_flight, wire = FramesInFlight(asyncio.get_running_loop(), 2), Wire()
        frames = [frame(number, shard=number % 2) for number in range(FEWEST_PUSHES + 2)]
        sending = asyncio.create_task(frames_in_flight.push(wire.send, frames))
        await a_moment()
        assert wire.sent == frames[:FEWEST_PUSHES]
        await wire.acknowledge(1)
        assert wire.sent == frames[: FEWEST_PUSHES + 1]
        await wire.acknowledge(0)
        assert wire.sent == frames
        for position in range(2, len(frames)):
            assert not sending.done()
            await wire.acknowledge(position)
        await sending

    asyncio.run(work())


def test_frames_of_a_later_call_follow_all_of_an_earlier_one() -> None:
    async def work() -> None:
        frames_in_flight, wire = FramesInFlight(asyncio.get_running_loop(), 2), Wire()
        earlier = [frame(number) for number in range(FEWEST_PUSHES + 1)]
        later = [frame(100, num_bytes=4)]
        calls = [asyncio.create_task(frames_in_flight.push(wire.send, frames)) for frames in (earlier, later)]
        await a_moment()
        assert wire.sent == earlier[:FEWEST_PUSHES]
        await wire.acknowledge(0)
        await wire.acknowledge(1)
        assert wire.sent == earlier + later
        for call in calls:
            call.cancel()

    asyncio.run(work())


def test_an_error_is_its_frames_alone_and_makes_room() -> None:
    async def work() -> None:
        frames_in_flight, wire = FramesInFlight(asyncio.get_running_loop(), 2), Wire()
        sending = asyncio.create_task(frames_in_flight.push(wire.send, [frame(number) for number in range(2)]))
        await a_moment()
        await wire.refuse(0)
        assert not sending.done()
        await wire.acknowledge(1)
        refused, acknowledged = await sending
        assert isinstance(refused.exception(), BadArgument)
        assert acknowledged.result() is None
        assert frames_in_flight.is_empty

    asyncio.run(work())


def test_what_is_given_up_is_not_sent_but_takes_room_as_long_as_it_is_on_its_way() -> None:
    async def work() -> None:
        frames_in_flight, wire = FramesInFlight(asyncio.get_running_loop(), 2), Wire()
        frames = [frame(number) for number in range(2 * FEWEST_PUSHES)]
        given_up = asyncio.create_task(frames_in_flight.push(wire.send, frames))
        await a_moment()
        last = frame(100)
        following = asyncio.create_task(frames_in_flight.push(wire.send, [last]))
        await a_moment()
        given_up.cancel()
        await a_moment()
        assert wire.sent == frames[:FEWEST_PUSHES]
        await wire.acknowledge(0)
        assert wire.sent == [*frames[:FEWEST_PUSHES], last]
        await wire.acknowledge(FEWEST_PUSHES)
        await following

    asyncio.run(work())


def test_frames_that_fail_as_they_are_sent_do_not_hold_up_those_behind_them() -> None:
    """As when the connection is gone for good: more of them than calls may be nested."""

    def fail(_: Transfer, future: Future) -> None:
        future.set_exception(BadArgument("gone"))

    async def work() -> None:
        frames_in_flight = FramesInFlight(asyncio.get_running_loop(), 2)
        ended = await frames_in_flight.push(fail, [frame(number) for number in range(sys.getrecursionlimit())])
        assert all(isinstance(one.exception(), BadArgument) for one in ended)

    asyncio.run(work())


def test_as_many_frames_are_on_their_way_as_keep_all_shards_busy() -> None:
    async def work() -> None:
        for num_shards, expected in ((1, FEWEST_PUSHES), (8, 8)):
            frames_in_flight, wire = FramesInFlight(asyncio.get_running_loop(), num_shards), Wire()
            frames = [frame(number, shard=number % num_shards) for number in range(20)]
            sending = asyncio.create_task(frames_in_flight.push(wire.send, frames))
            await a_moment()
            assert wire.sent == frames[:expected]
            sending.cancel()

    asyncio.run(work())
