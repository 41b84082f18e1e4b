"""Frames of pushes in a round that was committed early: in one order, and few of them on their way at a time."""

from __future__ import annotations

import asyncio
import sys

from psstore import _core
from psstore.client.flight import Flight
from psstore.client.window import FEWEST_PUSHES
from psstore.errors import BadArgument
from psstore.protocol.client import Transfer
from psstore.protocol.requests import Future

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


async def a_moment() -> None:
    """All that can go on does."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_frame_waits_until_one_before_it_is_acknowledged_whatever_its_shard() -> None:
    async def work() -> None:
        flight, wire = Flight(asyncio.get_running_loop(), 2), Wire()
        frames = [frame(number, shard=number % 2) for number in range(FEWEST_PUSHES + 2)]
        sending = asyncio.create_task(flight.push(wire.send, frames))
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
        flight, wire = Flight(asyncio.get_running_loop(), 2), Wire()
        earlier = [frame(number) for number in range(FEWEST_PUSHES + 1)]
        later = [frame(100, num_bytes=4)]
        calls = [asyncio.create_task(flight.push(wire.send, frames)) for frames in (earlier, later)]
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
        flight, wire = Flight(asyncio.get_running_loop(), 2), Wire()
        sending = asyncio.create_task(flight.push(wire.send, [frame(number) for number in range(2)]))
        await a_moment()
        await wire.refuse(0)
        assert not sending.done()
        await wire.acknowledge(1)
        refused, acknowledged = await sending
        assert isinstance(refused.exception(), BadArgument)
        assert acknowledged.result() is None
        assert flight.is_empty

    asyncio.run(work())


def test_what_is_given_up_is_not_sent_but_takes_room_as_long_as_it_is_on_its_way() -> None:
    async def work() -> None:
        flight, wire = Flight(asyncio.get_running_loop(), 2), Wire()
        frames = [frame(number) for number in range(2 * FEWEST_PUSHES)]
        given_up = asyncio.create_task(flight.push(wire.send, frames))
        await a_moment()
        last = frame(100)
        following = asyncio.create_task(flight.push(wire.send, [last]))
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
        flight = Flight(asyncio.get_running_loop(), 2)
        flown = await flight.push(fail, [frame(number) for number in range(sys.getrecursionlimit())])
        assert all(isinstance(one.exception(), BadArgument) for one in flown)

    asyncio.run(work())


def test_as_many_frames_are_on_their_way_as_keep_all_shards_busy() -> None:
    async def work() -> None:
        for num_shards, expected in ((1, FEWEST_PUSHES), (8, 8)):
            flight, wire = Flight(asyncio.get_running_loop(), num_shards), Wire()
            frames = [frame(number, shard=number % num_shards) for number in range(20)]
            sending = asyncio.create_task(flight.push(wire.send, frames))
            await a_moment()
            assert wire.sent == frames[:expected]
            sending.cancel()

    asyncio.run(work())
