"""A store's ways to and from devices, one for each device and direction (staging.py), and what goes by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from psstore import _core
from psstore.client.compression import DeviceEncoder
from psstore.client.device_arrays import OnDevice
from psstore.client.following import Arrival as Followed
from psstore.client.kept_floats import DeviceFloats, Floats, Kept
from psstore.client.layout import Layout
from psstore.client.near import Neighbours
from psstore.client.staging import Passage, Pull, Send
from psstore.protocol.requests import Answer


class Departure(NamedTuple):
    """What is pushed from one device: the layout's arrays, to be sent by somebody else's means."""

    passage: Passage
    layout: Layout
    arrays: Sequence[OnDevice]

    async def sent(self, send: Send) -> None:
        await self.passage.push(self.layout, self.arrays, send)


class EncodedDeparture(NamedTuple):
    """The same in codecs."""

    passage: Passage
    layout: Layout
    arrays: Sequence[OnDevice]
    encoders: Sequence[DeviceEncoder]
    """Of each."""
    encoded: Callable[[], None]
    """Called when they have had all they are to do."""

    async def sent(self, send: Send) -> None:
        await self.passage.push_encoded(self.layout, self.arrays, self.encoders, send, encoded=self.encoded)


class Arrival(NamedTuple):
    """What is pulled onto one device."""

    passage: Passage
    layout: Layout
    arrays: Sequence[OnDevice]
    newer_than: int | None

    async def received(self, pull: Pull) -> list[Answer]:
        return await self.passage.pull(self.layout, self.arrays, pull, newer_than=self.newer_than)


class FollowedArrival(NamedTuple):
    """What is pulled of tensors that are followed on one device."""

    passage: Passage
    arrivals: Sequence[Followed]

    async def received(self, pull: Pull) -> list[Answer]:
        return await self.passage.follow(self.arrivals, pull)


class Passages:
    """Of one store, by device: made when they are first needed. Used on its loop only."""

    def __init__(self, neighbours: Neighbours) -> None:
        self._neighbours = neighbours
        self._passages: dict[tuple[_core.Device, str], Passage] = {}

    def out_of(self, device: _core.Device) -> Passage:
        """For what is pushed."""
        return self._passage(device, "out")

    def into(self, device: _core.Device) -> Passage:
        """For what is pulled."""
        return self._passage(device, "in")

    async def brought(self, floats: Sequence[Kept], place: _core.Device | None) -> list[Kept]:
        """Copies of what is kept, all of it there: on that device, or in main memory. Raises OutOfMemory."""
        copies: list[Floats] = []
        for one in floats:
            if isinstance(one, DeviceFloats):
                (fetched,) = await self.out_of(one.device).fetch([one.as_array()])
                copies.append(fetched.data.view(np.float32))
            else:
                copies.append(one)
        if place is None:
            return list(copies)
        there = DeviceFloats.together(place, [one.size for one in copies])
        memories = [one.view(np.uint8) for one in copies]
        await self.into(place).deliver(memories, [one.as_array() for one in there])
        return list(there)

    async def near(self, device: _core.Device) -> frozenset[int]:
        """The ways to shards that share it."""
        return await self._neighbours.ways(device)

    def _passage(self, device: _core.Device, direction: str) -> Passage:
        passage = self._passages.get((device, direction))
        if passage is None:
            passage = self._passages[device, direction] = Passage(device, self._neighbours)
        return passage
