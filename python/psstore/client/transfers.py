"""A store's ways to and from devices, one for each device and direction (pinned_transfer.py), and what goes by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from psstore import _core
from psstore.client.compression import DeviceEncoder
from psstore.client.device_arrays import OnDevice
from psstore.client.following import ReceivedFrame
from psstore.client.kept_floats import DeviceFloats, Floats, Kept
from psstore.client.layout import Layout
from psstore.client.near import PeerDirectory
from psstore.client.pinned_transfer import PinnedTransfer, Pull, Send
from psstore.protocol.requests import Answer


class Upload(NamedTuple):
    """What is pushed from one device: the layout's arrays, to be sent by somebody else's means."""

    pinned: PinnedTransfer
    layout: Layout
    arrays: Sequence[OnDevice]

    async def sent(self, send: Send) -> None:
        await self.pinned.push(self.layout, self.arrays, send)


class EncodedUpload(NamedTuple):
    """What is pushed from one device in codecs."""

    pinned: PinnedTransfer
    layout: Layout
    arrays: Sequence[OnDevice]
    encoders: Sequence[DeviceEncoder]
    """One for each array."""
    encoded: Callable[[], None]
    """Called when they have had all they are to do."""

    async def sent(self, send: Send) -> None:
        await self.pinned.push_encoded(self.layout, self.arrays, self.encoders, send, encoded=self.encoded)


class Download(NamedTuple):
    """What is pulled onto one device."""

    pinned: PinnedTransfer
    layout: Layout
    arrays: Sequence[OnDevice]
    newer_than: int | None

    async def received(self, pull: Pull) -> list[Answer]:
        return await self.pinned.pull(self.layout, self.arrays, pull, newer_than=self.newer_than)


class FollowedDownload(NamedTuple):
    """What is pulled of tensors that are followed on one device."""

    pinned: PinnedTransfer
    arrivals: Sequence[ReceivedFrame]

    async def received(self, pull: Pull) -> list[Answer]:
        return await self.pinned.follow(self.arrivals, pull)


class Transfers:
    """One store's pinned transfers, by device and direction: made when first needed. Used on the store's loop only."""

    def __init__(self, neighbours: PeerDirectory) -> None:
        self._neighbours = neighbours
        self._transfers: dict[tuple[_core.Device, str], PinnedTransfer] = {}

    def out_of(self, device: _core.Device) -> PinnedTransfer:
        """For what is pushed."""
        return self._pinned(device, "out")

    def into(self, device: _core.Device) -> PinnedTransfer:
        """For what is pulled."""
        return self._pinned(device, "in")

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

    def _pinned(self, device: _core.Device, direction: str) -> PinnedTransfer:
        pinned = self._transfers.get((device, direction))
        if pinned is None:
            pinned = self._transfers[device, direction] = PinnedTransfer(device, self._neighbours)
        return pinned
