"""Frames of pushes in a round that was committed early: in one order, and few of them on their way at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from psstore import _core
from psstore.client.flight import Flight
from psstore.client.window import FEWEST_PUSHES
from psstore.errors import BadArgument
from psstore.protocol.client import Transfer

FRAME_BYTES = 4096


def frame(number: int, *, shard: int = 0, num_bytes: int = FRAME_BYTES) -> Transfer:
    return Transfer(shard, _core.SliceTable([(number, num_bytes, _core.DTYPES["float32"])]), None)


class Wire:
    """What was sent, and who acknowledges it."""

    def __init__(self) -> None:
        self.sent: list[Transfer] = []
        self._answers: list[asyncio.Future[None]] = []

    async def push(self, transfers: Sequence[Transfer]) -> None:
        self.sent += transfers
        answer = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        await answer

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
        flight, wire = Flight(asyncio.get_running_loop()), Wire()
        frames = [frame(number, shard=number % 2) for number in range(FEWEST_PUSHES + 2)]
        sending = asyncio.create_task(flight.send(wire.push, frames))
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
        flight, wire = Flight(asyncio.get_running_loop()), Wire()
        earlier = [frame(number) for number in range(FEWEST_PUSHES + 1)]
        later = [frame(100, num_bytes=4)]
        calls = [asyncio.create_task(flight.send(wire.push, frames)) for frames in (earlier, later)]
        await a_moment()
        assert wire.sent == earlier[:FEWEST_PUSHES]
        await wire.acknowledge(0)
        await wire.acknowledge(1)
        assert wire.sent == earlier + later
        for call in calls:
            call.cancel()

    asyncio.run(work())


def test_an_error_is_raised_when_the_other_frames_have_ended_and_makes_room() -> None:
    async def work() -> None:
        flight, wire = Flight(asyncio.get_running_loop()), Wire()
        sending = asyncio.create_task(flight.send(wire.push, [frame(number) for number in range(2)]))
        await a_moment()
        await wire.refuse(0)
        assert not sending.done()
        await wire.acknowledge(1)
        with pytest.raises(BadArgument):
            await sending
        assert flight.is_empty

    asyncio.run(work())


def test_who_is_cancelled_leaves_room_for_others() -> None:
    async def work() -> None:
        flight, wire = Flight(asyncio.get_running_loop()), Wire()
        given_up = asyncio.create_task(flight.send(wire.push, [frame(number) for number in range(2 * FEWEST_PUSHES)]))
        await a_moment()
        given_up.cancel()
        await a_moment()
        assert flight.is_empty
        following = asyncio.create_task(flight.send(wire.push, [frame(100)]))
        await a_moment()
        await wire.acknowledge(FEWEST_PUSHES)
        await following

    asyncio.run(work())
